"""Keys and random tensors of toy models of MiniMax-M3's kind, by the GGUF convention.

Layers with experts choose what blocks of positions each head of keys reads. `extra` has the counts that only this
architecture has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.toy_routers import attention

if TYPE_CHECKING:
    import numpy as np

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw


def minimax_m3_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A token reads all positions, if a case does not say otherwise."""
    return {
        "feed_forward_length": 2 * toy.intermediate,
        "leading_dense_block_count": toy.dense,
        "attention.indexer.head_count": toy.kv_heads,
        "attention.indexer.key_length": toy.head_dim,
        "attention.indexer.top_k": toy.context,
        "attention.indexer.block_size": 8,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_count": toy.rotary,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.0,
    }


def minimax_m3_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    weights = attention(toy, draw) | {"ffn_norm.weight": draw.gain(toy.hidden)}
    for part in ("q", "k"):
        # Which makes scores differ by some units.
        weights[f"attn_{part}_norm.weight"] = draw.vector(toy.head_dim, spread=0.3, mean=1.3)
    if layer < toy.dense:
        return weights | _swiglu(draw, "", 2 * toy.intermediate, toy.hidden)
    size = toy.extra.get("attention.indexer.key_length", toy.head_dim)
    weights |= {
        "indexer.q_proj.weight": draw.matrix(toy.kv_heads * size, toy.hidden),
        "indexer.k_proj.weight": draw.matrix(size, toy.hidden),
        "indexer.q_norm.weight": draw.vector(size, spread=0.3, mean=1.0),
        "indexer.k_norm.weight": draw.vector(size, spread=0.3, mean=1.0),
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
        "exp_probs_b.bias": draw.vector(toy.experts, spread=0.2),
    }
    shared = toy.extra.get("expert_shared_count", 1) * toy.intermediate
    weights |= _swiglu(draw, "_exps", toy.intermediate, toy.hidden, toy.experts)
    return weights | _swiglu(draw, "_shexp", shared, toy.hidden)


def _swiglu(draw: Draw, role: str, width: int, hidden: int, *experts: int) -> dict[str, np.ndarray]:
    """Return what is so loud that some gates and other values reach the limit of seven."""
    return {
        f"ffn_gate{role}.weight": draw.matrix(*experts, width, hidden, gain=4.0),
        f"ffn_up{role}.weight": draw.matrix(*experts, width, hidden, gain=4.0),
        f"ffn_down{role}.weight": draw.matrix(*experts, hidden, width, gain=0.1),
    }
