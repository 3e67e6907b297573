"""Parts of toy models that architectures share: random tensors, attention, experts, feed-forwards.

Knows the GGUF convention. Knows no architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch

Weights = dict[str, np.ndarray]


class Draw:
    """Random tensors of the usual spreads."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def matrix(self, *dims: int, gain: float = 1.0) -> np.ndarray:
        """Numbers that keep the power of what they multiply, times `gain`."""
        return self.vector(*dims, spread=gain / np.sqrt(dims[-1]))

    def gain(self, length: int) -> np.ndarray:
        """A norm's numbers, near one."""
        return self.vector(length, spread=0.1, mean=1.0)

    def vector(self, *dims: int, spread: float, mean: float = 0.0) -> np.ndarray:
        """Normal numbers."""
        return (mean + spread * self._rng.standard_normal(dims)).astype(np.float32)


def attention(toy: ToyArch, draw: Draw, heads: int | None = None, q_rows: int = 1) -> Weights:
    """Return grouped-query attention with the norm before it. heads: where they are others; q_rows: rows of q per number."""
    q_size, kv_size = (heads or toy.heads) * toy.head_dim, toy.kv_heads * toy.head_dim
    return {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_q.weight": draw.matrix(q_rows * q_size, toy.hidden),
        "attn_k.weight": draw.matrix(kv_size, toy.hidden),
        "attn_v.weight": draw.matrix(kv_size, toy.hidden),
        "attn_output.weight": draw.matrix(toy.hidden, q_size),
    }


def head_norms(toy: ToyArch, draw: Draw) -> Weights:
    """Return norms of the heads of q and k."""
    return {f"attn_{part}_norm.weight": draw.gain(toy.head_dim) for part in ("q", "k")}


def experts(toy: ToyArch, draw: Draw) -> Weights:
    """Return a router and the experts behind it."""
    return {
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
        "ffn_gate_exps.weight": draw.matrix(toy.experts, toy.intermediate, toy.hidden),
        "ffn_up_exps.weight": draw.matrix(toy.experts, toy.intermediate, toy.hidden),
        "ffn_down_exps.weight": draw.matrix(toy.experts, toy.hidden, toy.intermediate),
    }


def dense(toy: ToyArch, draw: Draw, width: int, suffix: str) -> Weights:
    """Return a feed-forward whose tensors' names end in `suffix`."""
    return {
        f"ffn_gate{suffix}.weight": draw.matrix(width, toy.hidden),
        f"ffn_up{suffix}.weight": draw.matrix(width, toy.hidden),
        f"ffn_down{suffix}.weight": draw.matrix(toy.hidden, width),
    }
