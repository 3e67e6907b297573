"""Toy models of architectures whose norms take the mean off, with or without biases: what keys and tensors each has.

Knows the GGUF convention of each architecture. Knows no oracle, and not how a file is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_model import byte_vocabulary
from tests.support.toy_parts import attention, experts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

    Weights = dict[str, np.ndarray]


def _dbrx_keys(toy: ToyArch) -> dict[str, Any]:
    """A limit that a quarter of all numbers of q, k and v reach."""
    return {
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": 1.2,
        "feed_forward_length": toy.intermediate,
        "expert_feed_forward_length": None,
        "attention.key_length": None,
        "attention.value_length": None,
    }


def _dbrx_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = attention(toy, draw)
    parts = [weights.pop(f"attn_{part}.weight") for part in "qkv"]
    return {
        **weights,
        "attn_qkv.weight": np.concatenate(parts),
        "attn_output_norm.weight": draw.gain(toy.hidden),
        **experts(toy, draw),
    }


def _phimoe_keys(toy: ToyArch) -> dict[str, Any]:
    """`stretched`: with factors of a context made longer; `extra` says of which."""
    keys = {
        "feed_forward_length": toy.intermediate,
        "expert_feed_forward_length": None,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.sliding_window": toy.window,
        "rope.dimension_count": toy.head_dim,
        "rope.scaling.original_context_length": toy.context,
    }
    return keys | ({"rope.scaling.attn_factor": 1.19} if toy.stretched else {})


def _phimoe_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """Rows of the router are alike by twos, or few logits would be near each other."""
    weights = attention(toy, draw) | {"ffn_norm.weight": draw.gain(toy.hidden)}
    weights |= experts(toy, draw)
    for name in ("attn_norm", "ffn_norm"):
        weights[f"{name}.bias"] = draw.vector(toy.hidden, spread=0.3)
    for part in (*"qkv", "output") if toy.biased else ():
        rows = len(weights[f"attn_{part}.weight"])
        weights[f"attn_{part}.bias"] = draw.vector(rows, spread=0.3)
    router = weights["ffn_gate_inp.weight"]
    others = router[1::2]
    others[:] = router[: 2 * len(others) : 2] * draw.vector(*others.shape, spread=0.04, mean=1.0)
    return weights


def _phimoe_top(toy: ToyArch, draw: Draw) -> Weights:
    weights = {"output_norm.bias": draw.vector(toy.hidden, spread=0.3)}
    if toy.biased:
        weights["output.bias"] = draw.vector(len(byte_vocabulary()[0]), spread=0.5)
    if toy.stretched:
        for which, spread in (("short", 0.05), ("long", 1.0)):
            factors = np.exp(np.abs(draw.vector(toy.head_dim // 2, spread=spread)))
            weights[f"rope_factors_{which}.weight"] = factors.astype(np.float32)
    return weights


KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {
    "dbrx": _dbrx_keys,
    "phimoe": _phimoe_keys,
}
LAYERS: dict[str, Callable[[ToyArch, Draw, int], Weights]] = {
    "dbrx": _dbrx_layer,
    "phimoe": _phimoe_layer,
}
TOP: dict[str, Callable[[ToyArch, Draw], Weights]] = {
    "phimoe": _phimoe_top,
}
