"""Tiny random models with several residual streams, as `tiny_hf` takes them: Qwen3.8-Flash-Next in small.

Knows their configuration, and what the hub's checkpoints have that transformers does not write.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

END_OF_TEXT = 178
"""Ends n-grams. It stands once among the first 65 tokens of prompts, and then again."""
_IMAGE_TOKEN = 300
DIVIDED = ("input_mix_weight_down.weight", "block_inject_weight.weight")
"""What these give is divided by the number of streams, and would leave their gates half open."""


def _config(common: dict[str, Any], tiny: TinyModel) -> Any:
    wide = tiny.hidden >= 256
    own = {
        "shared_expert_intermediate_size": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * (tiny.layers // 2),
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
        "output_gate_type": "sigmoid",
        "hc_count": 4,
        "hc_lowrank": 256 if wide else 24,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 60,
        "make_ngram_vocab_size_divisible_by": 32,
        "split_ngram_parts": 3,
        "eos_token_id": END_OF_TEXT,
    }
    return transformers.Qwen4ExpTextConfig(**(common | own | tiny.options))


def _as_published(folder: Path, config: Any) -> None:
    """Put the configuration beside that of images, and name layers and tensors as the hub's checkpoint does."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    kinds = {"linear_attention": "linear_attention", "indexed_attention": "full_attention"}
    text = saved | {
        "layer_types": [kinds[kind] for kind in config.layer_types],
        "full_attention_interval": 4,
    }
    for name in ("architectures", "transformers_version"):
        text.pop(name, None)
    settings = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": _IMAGE_TOKEN,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
    }
    path.write_text(json.dumps(settings))
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        inner = name.startswith("model.") and not name.startswith("model.language_model.")
        tensors[name.replace("model.", "model.language_model.", 1) if inner else name] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


_ALL_POSITIONS = {"indexer_budget": 512}
_NO_NGRAMS: dict[str, Any] = {"ple_layer_ids": []}
_IRREGULAR = ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"]
"""Not as the interval says that is written, too."""
_UNEVEN = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 23,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 10,
    "layer_types": _IRREGULAR,
    "hc_count": 2,
    "hc_lowrank": 11,
    "indexer_n_heads": 13,
    "indexer_head_dim": 18,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
    "ple_layer_ids": [3],
    "ple_conv_kernel_size": 3,
    "ngram_size": 2,
    "split_ngram_parts": 1,
}
_LAST_ATTENDS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_WIDE = {
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "indexer_budget": 512,
}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "qwen4exp", {"layers": 4}),
    ("last_attends", "qwen4exp", {"layers": 4, "options": _LAST_ATTENDS, "seed": 2}),
    ("uneven", "qwen4exp", {"layers": 5, "options": _UNEVEN, "seed": 3}),
    ("all_positions", "qwen4exp", {"options": _ALL_POSITIONS, "seed": 4}),
    ("no_ngrams", "qwen4exp", {"options": _NO_NGRAMS, "seed": 5}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (("wide", "qwen4exp", {"options": _WIDE}),)
"""The same of models that are quantised. All positions are read, where llama.cpp computes what transformers does."""
CLASSES = {"qwen4exp": "Qwen4ExpForCausalLM"}
CONFIGS = {"qwen4exp": _config}
PUBLISHED = {"qwen4exp": _as_published}
"""What makes a saved checkpoint one as the hub has it."""
