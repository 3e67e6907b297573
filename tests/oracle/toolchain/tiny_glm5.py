"""Tiny random models of GLM-5.3-Flash's kind, as `tiny_hf` takes them.

Knows their configuration, and what the hub's checkpoints have that transformers does not write.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm5NextTextConfig

from tests.oracle.hf_glm5 import Glm5NextForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

_IMAGE_TOKEN = 300
FAINT = ("compress_ape",)
"""What is added to numbers of a spread of one, and would hardly count beside them."""
_LIMIT = 1.0
"""Small enough to be reached."""


def _config(common: dict[str, Any], tiny: TinyModel) -> Any:
    wide = tiny.hidden >= 256
    kept = {
        name: value
        for name, value in common.items()
        if name not in ("num_experts", "head_dim", "rope_parameters")
    }
    own = {
        "num_key_value_heads": common["num_attention_heads"],
        "n_routed_experts": common["num_experts"],
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "intermediate_size": 256 if wide else 64,
        "mlp_layer_types": ["dense"] + ["sparse"] * (tiny.layers - 1),
        "layer_types": _STATES_FIRST * (tiny.layers // 2),
        "indexer_types": ["full"] * tiny.layers,
        "q_lora_rank": 256 if wide else 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 0,
        "v_head_dim": 32,
        "linear_head_dim": 16,
        "linear_num_heads": common["num_attention_heads"],
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "index_kpool": 4,
        "hc_mult": 4,
        "swiglu_limit": _LIMIT,
        "bos_token_id": None,
    }
    return Glm5NextTextConfig(**(kept | own | tiny.options))


def add_glm5_block(folder: Path, config: Any) -> None:
    """Add a block that guesses a further token, which has one residual stream and chooses positions itself."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    count, hidden = config.num_hidden_layers, config.hidden_size
    last, block = f"model.layers.{count - 1}.", f"model.layers.{count}."  # of attention
    added = {
        block + name.removeprefix(last): values.flip(0).contiguous()
        for name, values in tensors.items()
        if name.startswith(last) and ".hc_" not in name
    }
    added[block + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{block}{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
    save_file(tensors | added, path, {"format": "pt"})
    config.num_nextn_predict_layers = 1


def _as_published(folder: Path, config: Any) -> None:
    """Put the configuration beside that of images, and name settings and tensors as the hub's checkpoint does."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    linear = {
        "head_dim": config.linear_head_dim,
        "num_heads": config.linear_num_heads,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
        "safe_gate": config.linear_lower_bound is not None,
        "gate_lower_bound": config.linear_lower_bound,
    }
    kinds = {"linear_attention": "linear_attention", "indexed_attention": "full_attention"}
    theirs = ("architectures", "transformers_version", "mlp_layer_types", "head_dim")
    text = {
        name: value
        for name, value in saved.items()
        if name not in theirs and not name.startswith("linear_")
    }
    text |= {
        "layer_types": [kinds[kind] for kind in config.layer_types],
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "mhc": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": getattr(config, "num_nextn_predict_layers", 0),
    }
    settings = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "image_token_id": _IMAGE_TOKEN,
        "tie_word_embeddings": False,
        "text_config": text,
    }
    path.write_text(json.dumps(settings))
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


_STATES_FIRST = ["linear_attention", "indexed_attention"]
_UNEVEN = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": 29,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 11,
    "v_head_dim": 13,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
    "layer_types": [*_STATES_FIRST, *_STATES_FIRST, "linear_attention"],
    "linear_num_heads": 3,
    "linear_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "linear_lower_bound": None,
    "index_n_heads": 13,
    "index_head_dim": 18,
    "index_topk": 6,
    "index_kpool": 3,
    "swiglu_limit": 0.7,
    "hc_sinkhorn_iters": 5,
    "rms_norm_eps": 1e-5,
}
_SHARED = {
    "layer_types": [*_STATES_FIRST, "indexed_attention", *_STATES_FIRST],
    "indexer_types": ["full", "full", "shared", "full", "shared"],
}
_ALL_POSITIONS = {"index_topk": 512, "mlp_layer_types": ["sparse"] * 2}
# A rounded number changes which positions are chosen: of more of them that is less.
_WIDE = {"moe_intermediate_size": 256, "linear_head_dim": 64, "index_topk": 512}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "glm5_next", {"layers": 4}),
    ("uneven", "glm5_next", {"layers": 5, "options": _UNEVEN, "seed": 2}),
    ("extra_block", "glm5_next", {"layers": 4, "extra_block": True, "seed": 3}),
    ("shared", "glm5_next", {"layers": 5, "options": _SHARED, "seed": 4}),
    ("all_positions", "glm5_next", {"options": _ALL_POSITIONS, "seed": 5}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (("wide", "glm5_next", {"options": _WIDE}),)
"""The same of models that are quantised."""
CLASSES = {"glm5_next": Glm5NextForCausalLM}
CONFIGS = {"glm5_next": _config}
PUBLISHED = {"glm5_next": _as_published}
"""What makes a saved checkpoint one as the hub has it."""
