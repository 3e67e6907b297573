"""Keys and random tensors of toy models with the first Mamba, by the GGUF convention.

`ToyArch.interval` says which layers attend, `dense` how many layers without experts lie before each one with experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_gemma import NO_EXPERTS
from tests.support.toy_parts import Weights, attention, dense, experts

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw


def jamba_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. All feed-forwards have one width."""
    return ({} if toy.experts else NO_EXPERTS) | {
        "attention.head_count_kv": [
            toy.kv_heads if _attends(toy, layer) else 0 for layer in range(toy.layers)
        ],
        "feed_forward_length": toy.intermediate,
        "expert_feed_forward_length": None,
        "ssm.conv_kernel": toy.conv_width,
        "ssm.state_size": toy.state,
        "ssm.time_step_rank": toy.rank,
        "ssm.inner_size": _width(toy),
    }


def jamba_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """Return one layer."""
    weights = attention(toy, draw) if _attends(toy, layer) else _mamba(toy, draw)
    weights["ffn_norm.weight"] = draw.gain(toy.hidden)
    if toy.experts and layer % (toy.dense + 1) == toy.dense:
        return weights | experts(toy, draw)
    return weights | dense(toy, draw, toy.intermediate, "")


def _mamba(toy: ToyArch, draw: Draw) -> Weights:
    width, state = _width(toy), toy.state
    return {
        "attn_norm.weight": draw.gain(toy.hidden),
        "ssm_in.weight": draw.matrix(2 * width, toy.hidden),
        "ssm_conv1d.weight": draw.vector(width, toy.conv_width, spread=0.5),
        "ssm_conv1d.bias": draw.vector(width, spread=0.3),
        "ssm_x.weight": draw.matrix(toy.rank + 2 * state, width),
        "ssm_dt_norm.weight": draw.gain(toy.rank),
        "ssm_b_norm.weight": draw.gain(state),
        "ssm_c_norm.weight": draw.gain(state),
        "ssm_dt.weight": draw.matrix(width, toy.rank),
        "ssm_dt.bias": draw.vector(width, spread=0.5, mean=-1.0),
        "ssm_a": -np.exp(draw.vector(width, state, spread=1.0, mean=-1.0)),
        "ssm_d": draw.vector(width, spread=0.3, mean=1.0),
        "ssm_out.weight": draw.matrix(toy.hidden, width),
    }


def _width(toy: ToyArch) -> int:
    width: int = toy.extra.get("ssm.inner_size", 2 * toy.hidden)
    return width


def _attends(toy: ToyArch, layer: int) -> bool:
    return (layer + 1) % toy.interval == 0
