"""Toy models of architectures whose norms take the mean off, with or without biases: what keys and tensors each has.

Knows the GGUF convention of each architecture. Knows no oracle, and not how a file is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

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


KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {
    "dbrx": _dbrx_keys,
}
LAYERS: dict[str, Callable[[ToyArch, Draw, int], Weights]] = {
    "dbrx": _dbrx_layer,
}
