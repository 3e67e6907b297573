"""Keys and random tensors of toy models of Hunyuan 4's kind, by the GGUF convention.

Layers are those of DeepSeek-V3.2 between several residual streams, with sinks and a gate for each number of a head. Counts that
only this architecture has come from `ToyArch.extra`, where `attention.indexer.top_k` may be None: then no layer chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.toy_latent import deepseek2_layer, deepseek32_keys, deepseek32_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

STREAMS = 4


def _keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A token reads all positions, if a case does not say otherwise."""
    return deepseek32_keys(toy) | {
        "attention.indexer.types": [True] * toy.layers,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.827,
        "hyper_connection.count": STREAMS,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.magnitude": 2.0,
    }


def _layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    chooses = toy.extra.get("attention.indexer.top_k", True)
    weights = (deepseek32_layer if chooses else deepseek2_layer)(toy, draw, layer)
    rows = toy.heads * toy.value_dim
    weights |= {
        "attn_gate.weight": draw.matrix(rows, toy.hidden, gain=1.5),
        "attn_sinks.weight": draw.vector(toy.heads, spread=1.0),
    }
    for part in ("attn", "ffn"):
        mixing = _mixing(toy, draw, 2)
        weights |= {f"hc_{part}_{name}": values for name, values in mixing.items()}
    return weights


def _top(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    """Return what sums the streams behind the last layer."""
    return {f"output_hc_{name}": values for name, values in _mixing(toy, draw, 1).items()}


def _mixing(toy: ToyArch, draw: Draw, parts: int) -> dict[str, np.ndarray]:
    """Return what weighs streams, and spreads over them where it has two parts, none of it nearly constant."""
    count = toy.extra.get("hyper_connection.count", STREAMS)
    return {
        "fn.weight": draw.matrix(parts * count, count * toy.hidden, gain=1.5),
        "base.weight": draw.vector(parts * count, spread=0.5, mean=-1.0),
        "scale.weight": draw.vector(parts, spread=0.4, mean=1.0),
    }


KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {"hy_v4": _keys}
LAYERS: dict[str, Callable[[ToyArch, Draw, int], dict[str, np.ndarray]]] = {"hy_v4": _layer}
TOP: dict[str, Callable[[ToyArch, Draw], dict[str, np.ndarray]]] = {"hy_v4": _top}
