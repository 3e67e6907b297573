"""Tiny random models of transformers' Jamba, as `tiny_hf` takes them. Knows their configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from tests.oracle.toolchain.tiny_hf import TinyModel


def _jamba(common: dict[str, Any], tiny: TinyModel) -> Any:
    """Return a model whose second of two layers attends, and whose other one has experts."""
    own = {
        "intermediate_size": 32,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "bos_token_id": None,
    }
    unknown = ("head_dim", "moe_intermediate_size", "rope_parameters")
    kept = {name: value for name, value in common.items() if name not in unknown}
    return transformers.JambaConfig(**(kept | own | tiny.options))


_UNEVEN = {
    "num_key_value_heads": 1,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 19,
    "attn_layer_period": 3,
    "expert_layer_offset": 1,
    "mamba_d_state": 7,
    "mamba_d_conv": 3,
    "mamba_dt_rank": "auto",
}
_DENSE = {"num_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True}
_ALL_ROUTED = {"expert_layer_period": 1}

OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "jamba", {}),
    ("uneven", "jamba", {"layers": 5, "options": _UNEVEN, "seed": 2}),
    ("dense", "jamba", {"layers": 3, "options": _DENSE, "seed": 3}),
    ("all_routed", "jamba", {"options": _ALL_ROUTED, "seed": 4}),
    ("unbiased", "jamba", {"options": {"mamba_conv_bias": False}, "seed": 5}),
)
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "jamba", {"options": {"intermediate_size": 256, "mamba_dt_rank": 256}}),
    ("narrow_steps", "jamba", {"options": {"intermediate_size": 256, "mamba_dt_rank": 24}}),
)
CLASSES = {"jamba": "JambaForCausalLM"}
CONFIGS = {"jamba": _jamba}
