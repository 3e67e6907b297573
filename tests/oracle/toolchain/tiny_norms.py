"""Tiny random models whose norms take the mean off, as `tiny_hf` takes them.

Knows their configurations, and how the hub names settings and tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel


def _dbrx(common: dict[str, Any], tiny: TinyModel) -> Any:
    """options: of its configuration of attention or of the feed-forward."""
    attention = {
        "kv_n_heads": common["num_key_value_heads"],
        "clip_qkv": 1.2,
        "rope_theta": common["rope_parameters"]["rope_theta"],
    }
    experts = {
        "ffn_hidden_size": common["moe_intermediate_size"],
        "moe_num_experts": common["num_experts"],
        "moe_top_k": common["num_experts_per_tok"],
        "moe_normalize_expert_weights": 1.0,
    }
    for part in (attention, experts):
        part |= {name: value for name, value in tiny.options.items() if name in part}
    return transformers.DbrxConfig(
        d_model=common["hidden_size"],
        n_heads=tiny.options.get("n_heads", common["num_attention_heads"]),
        n_layers=common["num_hidden_layers"],
        max_seq_len=common["max_position_embeddings"],
        vocab_size=common["vocab_size"],
        attn_config=attention,
        ffn_config=experts,
        rope_parameters=common["rope_parameters"],
        attn_implementation="eager",
        dtype="float32",
        eos_token_id=common["eos_token_id"],
        pad_token_id=common["pad_token_id"],
    )


_DBRX_UNEVEN = {
    "n_heads": 3,
    "kv_n_heads": 3,
    "ffn_hidden_size": 19,
    "moe_num_experts": 5,
    "moe_top_k": 3,
    "clip_qkv": 8.0,
}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "dbrx", {}),
    ("uneven", "dbrx", {"hidden": 30, "layers": 3, "options": _DBRX_UNEVEN, "seed": 2}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "dbrx", {"options": {"ffn_hidden_size": 256}}),
)
"""The same of models that are quantised."""
CLASSES = {"dbrx": "DbrxForCausalLM"}
CONFIGS: dict[str, Callable[[dict[str, Any], TinyModel], Any]] = {"dbrx": _dbrx}
PUBLISHED: dict[str, Callable[[Path, Any], None]] = {}
"""What makes a saved checkpoint one as the hub has it."""
