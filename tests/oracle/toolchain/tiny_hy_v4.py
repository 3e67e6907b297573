"""Tiny random models of Hunyuan 4's kind, as `tiny_hf` takes them.

Knows their configuration, and that neighbours turn together in the hub's checkpoints (docs/decisions/0121).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

_LIMIT = 1.0
"""Small enough to be reached."""
_SHARED = ("full", "full", "shared", "shared", "shared", "full")


def _config(common: dict[str, Any], tiny: TinyModel) -> Any:
    wide = tiny.hidden >= 256
    kept = {
        name: value for name, value in common.items() if name not in ("num_experts", "head_dim")
    }
    own = {
        "num_key_value_heads": common["num_attention_heads"],
        "n_routed_experts": common["num_experts"],
        "n_shared_experts": 1,
        "intermediate_size": 256 if wide else 64,
        "mlp_layer_types": ["dense"] + ["sparse"] * (tiny.layers - 1),
        "indexer_types": list(_SHARED[: tiny.layers]),
        "q_lora_rank": 256 if wide else 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 8,
        "swiglu_limit": _LIMIT,
        "bos_token_id": None,
    }
    return transformers.HYV4Config(**(kept | own | tiny.options))


def _as_published(folder: Path, config: Any) -> None:
    """Write rows that turn as the hub's checkpoints have them, under the names that these have."""
    path = folder / "model.safetensors"
    turned = config.qk_rope_head_dim
    sizes = {
        "self_attn.q_b_proj.weight": config.qk_nope_head_dim + turned,
        "self_attn.kv_a_proj_with_mqa.weight": config.kv_lora_rank + turned,
        **{
            f"self_attn.indexer.{name}": config.index_head_dim
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
        },
    }
    tensors = {_hub_name(name): values for name, values in load_file(path).items()}
    for name, values in tensors.items():
        for ending, size in sizes.items():
            if name.endswith(ending):
                tensors[name] = _in_pairs(values, size, turned)
    save_file(tensors, path, {"format": "pt"})


def _hub_name(name: str) -> str:
    """Return what the hub calls a tensor of which transformers says that it were called so."""
    name = name.replace("model.hc_pre.hc_head.", "model.hc_head.")
    name = re.sub(r"hc_pre\.(hc_(?:attn|mlp)_layer)\.", r"\1.hc_pre.", name)
    return re.sub(r"mlp\.((?:shared_experts\.)?)linear_gate\.", r"mlp.\1gate_proj.", name)


def _in_pairs(values: torch.Tensor, size: int, turned: int) -> torch.Tensor:
    """Return rows of heads of `size` whose last `turned` ones, two halves, are neighbours."""
    heads = values.reshape(-1, size, *values.shape[1:])
    halves = heads[:, size - turned :].unflatten(1, (2, turned // 2))
    pairs = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat((heads[:, : size - turned], pairs), dim=1).reshape(values.shape).contiguous()


_UNEVEN = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 29,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3,
    "index_n_heads": 13,
    "index_head_dim": 18,
    "index_topk": 6,
    "swiglu_limit": 0.7,
    "hc_mult": 3,
    "hc_magnitude": 1.5,
    "hc_eps": 1e-2,
    "rms_norm_eps": 1e-5,
}
_ALL_POSITIONS = {"index_topk": 512, "mlp_layer_types": ["sparse"] * 2}
# A rounded number changes which positions are chosen: of all of them none.
_WIDE = {"moe_intermediate_size": 256, "index_topk": 512}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "hy_v4", {"layers": 4}),
    ("uneven", "hy_v4", {"layers": 5, "options": _UNEVEN, "seed": 2}),
    ("shared", "hy_v4", {"layers": 6, "seed": 3}),
    ("all_positions", "hy_v4", {"options": _ALL_POSITIONS, "seed": 4}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "hy_v4", {"layers": 3, "options": _WIDE}),
)
"""The same of models that are quantised."""
CLASSES = {"hy_v4": "HYV4ForCausalLM"}
CONFIGS = {"hy_v4": _config}
PUBLISHED = {"hy_v4": _as_published}
"""What makes a saved checkpoint one as the hub has it."""
