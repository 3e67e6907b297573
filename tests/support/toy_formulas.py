"""Toy models of architectures that differ by the formula of their layers: what keys and tensors each has.

Knows the GGUF convention of each architecture. Knows no oracle, and not how a file is written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_routers import attention, feed_forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

    Weights = dict[str, np.ndarray]


def _oss_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "attention.sliding_window": toy.window,
        "rope.dimension_count": toy.head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
        # With heads of 16 the ramp ends just below dimension 2, where llama.cpp's rounded one ends. It reads no more keys.
        "rope.freq_base": math.exp(8 * math.log(64 / (2 * math.pi)) / (2 - 2e-6)),
    }


def _oss_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    q_size, kv_size = toy.heads * toy.head_dim, toy.kv_heads * toy.head_dim
    return {
        **attention(toy, draw),
        "attn_q.bias": draw.vector(q_size, spread=0.3),
        "attn_k.bias": draw.vector(kv_size, spread=0.3),
        "attn_v.bias": draw.vector(kv_size, spread=0.3),
        "attn_output.bias": draw.vector(toy.hidden, spread=0.3),
        "attn_sinks.weight": draw.vector(toy.heads, spread=1.0, mean=1.0),
        "post_attention_norm.weight": draw.gain(toy.hidden),
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
        "ffn_gate_inp.bias": draw.vector(toy.experts, spread=0.5),
        # Loud enough that some values are clamped.
        "ffn_gate_exps.weight": draw.matrix(toy.experts, toy.intermediate, toy.hidden, gain=4.0),
        "ffn_up_exps.weight": draw.matrix(toy.experts, toy.intermediate, toy.hidden, gain=4.0),
        "ffn_down_exps.weight": draw.matrix(toy.experts, toy.hidden, toy.intermediate, gain=0.2),
        "ffn_gate_exps.bias": draw.vector(toy.experts, toy.intermediate, spread=0.5),
        "ffn_up_exps.bias": draw.vector(toy.experts, toy.intermediate, spread=0.5),
        "ffn_down_exps.bias": draw.vector(toy.experts, toy.hidden, spread=0.3),
    }


_RMS = "attention.layer_norm_rms_epsilon"


def _cohere_keys(toy: ToyArch) -> dict[str, Any]:
    """Norms take the mean off, unless `extra` has an epsilon of others. `shared`: of all shared experts together."""
    own = {
        "attention.sliding_window": toy.window,
        "feed_forward_length": 2 * toy.intermediate,
        "leading_dense_block_count": toy.dense,
        "expert_weights_norm": True,
        "rope.dimension_count": toy.head_dim,
        "logit_scale": 0.6,
        _RMS: None,
    }
    if toy.shared:
        own |= {"expert_shared_count": 2, "expert_shared_feed_forward_length": toy.shared}
    return own if _RMS in toy.extra else own | {"attention.layer_norm_epsilon": 1e-5}


def _cohere_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """One norm is of attention and of the experts."""
    weights, dense = attention(toy, draw), 2 * toy.intermediate
    return weights | feed_forward(toy, draw, layer, dense=dense, shared=toy.shared)


def _maple_keys(toy: ToyArch) -> dict[str, Any]:
    """The last layer of every four sees all tokens. Limits that many values reach, and none in the second layer."""
    return {
        "attention.sliding_window": toy.window,
        "attention.sliding_window_pattern": [layer % 4 < 3 for layer in range(toy.layers)],
        "rope.dimension_count": toy.head_dim,
        "swiglu_clamp_exp": [0.0 if layer == 1 else 0.6 for layer in range(toy.layers)],
    }


def _maple_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = attention(toy, draw, "head") | {"ffn_norm.weight": draw.gain(toy.hidden)}
    return weights | feed_forward(toy, draw, layer)


def _thinker_keys(toy: ToyArch) -> dict[str, Any]:
    keys = {"expert_gating_func": 2, "rope.dimension_count": toy.head_dim}
    return keys | ({"attention.sliding_window": toy.window} if toy.window else {})


def _thinker_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = attention(toy, draw) | {"ffn_norm.weight": draw.gain(toy.hidden)}
    return weights | feed_forward(toy, draw, layer)


def _step_keys(toy: ToyArch) -> dict[str, Any]:
    """The first layer of every four sees all tokens. Limits that many values reach, also of the first, dense layer."""
    layers = range(toy.layers)
    return {
        "attention.head_count": [_step_heads(toy, layer) for layer in layers],
        "attention.head_count_kv": [toy.kv_heads] * toy.layers,
        "attention.sliding_window": toy.window,
        "attention.sliding_window_pattern": [layer % 4 > 0 for layer in layers],
        "rope.freq_base_swa": 500.0,
        "leading_dense_block_count": toy.dense,
        "feed_forward_length": 2 * toy.shared,
        "expert_shared_feed_forward_length": toy.shared,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
        "swiglu_clamp_exp": [0.0 if layer == 1 else 0.4 for layer in layers],
        "swiglu_clamp_shexp": [0.0 if layer == 2 else 0.6 for layer in layers],
    }


def _step_heads(toy: ToyArch, layer: int) -> int:
    """Layers with a window have more heads."""
    return toy.heads + (toy.kv_heads if layer % 4 else 0)


def _step_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    own = replace(toy, heads=_step_heads(toy, layer))
    weights = feed_forward(toy, draw, layer, dense=2 * toy.shared, shared=toy.shared, biased=True)
    return {
        **attention(own, draw, "head"),
        "attn_gate.weight": draw.matrix(own.heads, toy.hidden, gain=2.0),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **weights,
    }


def _mimo_keys(toy: ToyArch) -> dict[str, Any]:
    """Windows are numbers, as the converter writes them."""
    near = [_is_near(layer) for layer in range(toy.layers)]
    return {
        "attention.head_count_kv": [
            toy.near_kv_heads if is_near else toy.kv_heads for is_near in near
        ],
        "attention.value_length": toy.value_dim,
        "attention.value_scale": 0.707,
        "attention.sliding_window": toy.window,
        "attention.sliding_window_pattern": [int(is_near) for is_near in near],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "feed_forward_length": 2 * toy.intermediate,
        "rope.dimension_count": toy.rotary,
        "rope.freq_base_swa": 500.0,
    }


def _is_near(layer: int) -> bool:
    return layer % 3 > 0


def _mimo_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """Layers with a window have sinks, and heads of keys of their own."""
    kv_heads = toy.near_kv_heads if _is_near(layer) else toy.kv_heads
    rows = toy.heads * toy.head_dim, kv_heads * toy.head_dim, kv_heads * toy.value_dim
    parts = [draw.matrix(count, toy.hidden) for count in rows]
    names = [f"attn_{part}.weight" for part in "qkv"]
    weights = {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_output.weight": draw.matrix(toy.hidden, toy.heads * toy.value_dim),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **feed_forward(toy, draw, layer, dense=2 * toy.intermediate, biased=True),
    }
    if _is_near(layer):
        weights["attn_sinks.weight"] = draw.vector(toy.heads, spread=1.0, mean=1.0)
    if toy.joined:
        return weights | {"attn_qkv.weight": np.concatenate(parts)}
    return weights | dict(zip(names, parts, strict=True))


KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {
    "cohere2moe": _cohere_keys,
    "gpt-oss": _oss_keys,
    "maple": _maple_keys,
    "smallthinker": _thinker_keys,
    "step35": _step_keys,
    "mimo2": _mimo_keys,
}
LAYERS: dict[str, Callable[[ToyArch, Draw, int], Weights]] = {
    "cohere2moe": _cohere_layer,
    "gpt-oss": _oss_layer,
    "maple": _maple_layer,
    "smallthinker": _thinker_layer,
    "step35": _step_layer,
    "mimo2": _mimo_layer,
}
