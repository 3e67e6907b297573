"""Tiny random models of MiniMax-M3's kind, as `tiny_hf` takes them.

Knows their configuration, and how the hub names settings and tensors.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.oracle.toolchain.tiny_hf import TinyModel

_KINDS = {"dense": "full_attention", "sparse": "minimax_m3_sparse"}
_HUB_NAMES = (
    (r"^", "language_model."),
    (r"\.indexer\.([qk])_", r".index_\1_"),
    (r"\.mlp\.(experts|shared_experts|gate\.weight)", r".block_sparse_moe.\1"),
    (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"),
)
_IMAGE_TOKEN = 300


def _config(common: dict[str, Any], tiny: TinyModel) -> Any:
    left_out = ("num_experts", "moe_intermediate_size", "rope_parameters")
    kept = {name: value for name, value in common.items() if name not in left_out}
    width = 256 if tiny.hidden >= 256 else 32
    own = {
        "num_local_experts": common["num_experts"],
        "intermediate_size": width,
        "shared_intermediate_size": width,
        "dense_intermediate_size": 2 * width,
        "mlp_layer_types": ["dense"] + ["sparse"] * (tiny.layers - 1),
        "routed_scaling_factor": 2.0,
        "rotary_dim": 8,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "bos_token_id": None,
    }
    settings = kept | own | tiny.options
    # transformers multiplies by it and cuts off.
    fraction = (settings["rotary_dim"] + 0.5) / settings["head_dim"]
    settings |= {
        "rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": fraction},
        "layer_types": [_KINDS[kind] for kind in settings["mlp_layer_types"]],
        "index_n_heads": settings["num_key_value_heads"],
    }
    return transformers.MiniMaxM3VLTextConfig(**settings)


def _as_published(folder: Path, config: Any) -> None:
    """Put the configuration beside that of images, and name settings and tensors as the hub's checkpoint does."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(path).items():
        tensors |= _split(name, values)
    for pattern, theirs in _HUB_NAMES:
        tensors = {re.sub(pattern, theirs, name): values for name, values in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    saved = json.loads((folder / "config.json").read_text())
    theirs = ("architectures", "transformers_version", "rope_parameters", *_LAYER_LISTS)
    text = {
        name: value
        for name, value in saved.items()
        if name not in theirs and not name.startswith("index_")
    }
    freq = [int(kind == "sparse") for kind in config.mlp_layer_types]
    text |= {
        "hidden_act": "swigluoai",
        "rope_theta": config.rope_parameters["rope_theta"],
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "n_shared_experts": config.shared_intermediate_size // config.intermediate_size,
        "moe_layer_freq": freq,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "num_mtp_modules": 0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": config.index_head_dim,
            "sparse_num_index_heads": config.index_n_heads,
            "sparse_topk_blocks": config.index_topk_blocks,
            "sparse_block_size": config.index_block_size,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": config.index_local_blocks,
            "sparse_attention_freq": freq,
            "sparse_disable_index_value": freq,
        },
    }
    settings = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "image_token_index": _IMAGE_TOKEN,
        "tie_word_embeddings": False,
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(settings))


def _split(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor's parts by name: transformers joins gate and up, and all experts."""
    if name.endswith("mlp.experts.down_proj"):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{n}.w2.weight": each.contiguous() for n, each in enumerate(values)}
    if name.endswith("mlp.experts.gate_up_proj"):
        prefix = name.removesuffix("gate_up_proj")
        return {
            f"{prefix}{n}.{part}.weight": half.contiguous()
            for n, each in enumerate(values)
            for part, half in zip(("w1", "w3"), each.chunk(2), strict=True)
        }
    if "gate_up_proj" in name:
        halves = zip(("gate_proj", "up_proj"), values.chunk(2), strict=True)
        return {name.replace("gate_up_proj", part): half.contiguous() for part, half in halves}
    return {name: values}


_LAYER_LISTS = ("layer_types", "mlp_layer_types")
_UNEVEN = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "rotary_dim": 6,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 19,
    "shared_intermediate_size": 38,
    "dense_intermediate_size": 27,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
    "routed_scaling_factor": 1.5,
    "index_head_dim": 18,
    "index_block_size": 7,
    "index_topk_blocks": 4,
    "rms_norm_eps": 1e-5,
}
_LOCAL = {"index_block_size": 4, "index_topk_blocks": 5, "index_local_blocks": 3}
_NO_DENSE = {"mlp_layer_types": ["sparse"] * 2, "num_key_value_heads": 1}
# A rounded number changes which blocks are chosen: of all of them none.
_WIDE = {"rotary_dim": 32, "index_head_dim": 64, "index_topk_blocks": 64}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "minimax_m3", {"layers": 3}),
    ("uneven", "minimax_m3", {"layers": 5, "options": _UNEVEN, "seed": 2}),
    ("local_blocks", "minimax_m3", {"layers": 3, "options": _LOCAL, "seed": 3}),
    ("no_dense", "minimax_m3", {"options": _NO_DENSE, "seed": 4}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "minimax_m3", {"layers": 3, "options": _WIDE}),
)
"""The same of models that are quantised."""
CLASSES = {"minimax_m3": "MiniMaxM3VLForCausalLM"}
CONFIGS = {"minimax_m3": _config}
PUBLISHED = {"minimax_m3": _as_published}
"""What makes a saved checkpoint one as the hub has it."""
