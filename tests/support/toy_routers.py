"""Toy models of architectures that differ by their routers: what keys and tensors each has.

Knows the GGUF convention of each architecture. Knows no oracle, and not how a file is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support import toy_parts
from tests.support.toy_gemma import NO_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

    Weights = dict[str, np.ndarray]

_SHARED_COUNT = 2


def attention(toy: ToyArch, draw: Draw, norm: str = "") -> Weights:
    """Return grouped-query attention. norm: "head" for norms of each head, "wide" for norms over all heads."""
    q_size, kv_size = toy.heads * toy.head_dim, toy.kv_heads * toy.head_dim
    weights = toy_parts.attention(toy, draw)
    if norm:
        sizes = (q_size, kv_size) if norm == "wide" else (toy.head_dim, toy.head_dim)
        weights["attn_q_norm.weight"] = draw.gain(sizes[0])
        weights["attn_k_norm.weight"] = draw.gain(sizes[1])
    return weights


def feed_forward(
    toy: ToyArch, draw: Draw, layer: int, *, dense: int = 0, shared: int = 0, biased: bool = False
) -> Weights:
    """Return a dense layer at first, then routed experts. dense, shared: widths, 0 for none."""
    if dense and layer < toy.dense:
        return toy_parts.dense(toy, draw, dense, "")
    weights = toy_parts.experts(toy, draw)
    if biased:
        weights["exp_probs_b.bias"] = draw.vector(toy.experts, spread=0.2)
    if shared:
        weights |= toy_parts.dense(toy, draw, shared, "_shexp")
    return weights


def _sigmoid_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "expert_shared_count": _SHARED_COUNT,
        "leading_dense_block_count": toy.dense,
        "feed_forward_length": 2 * toy.shared,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
    }


def _partial(toy: ToyArch) -> dict[str, Any]:
    return {"rope.dimension_count": toy.rotary}


def _partial_sigmoid_keys(toy: ToyArch) -> dict[str, Any]:
    return _sigmoid_keys(toy) | _partial(toy)


def _glm4moe_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = attention(toy, draw, "" if toy.biased else "head")
    if toy.biased:
        for part in ("q", "k", "v"):
            rows = len(weights[f"attn_{part}.weight"])
            weights[f"attn_{part}.bias"] = draw.vector(rows, spread=0.3)
    return {
        **weights,
        "post_attention_norm.weight": draw.gain(toy.hidden),
        **_sigmoid_experts(toy, draw, layer),
    }


def _sigmoid_experts(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    shared = _SHARED_COUNT * toy.intermediate
    return feed_forward(toy, draw, layer, dense=2 * toy.shared, shared=shared, biased=True)


def _minimax_keys(toy: ToyArch) -> dict[str, Any]:
    return {"expert_gating_func": 2, "feed_forward_length": toy.intermediate} | _partial(toy)


def _minimax_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    return {
        **attention(toy, draw, "wide"),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **feed_forward(toy, draw, layer, biased=True),
    }


def _qwen3vl_keys(toy: ToyArch) -> dict[str, Any]:
    sections = [len(range(part, toy.head_dim // 2, 3)) for part in range(3)] + [0]
    return {"rope.dimension_sections": sections, "n_deepstack_layers": 0}


def _qwen3vl_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    return {
        **attention(toy, draw, "head"),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **feed_forward(toy, draw, layer),
    }


def _ernie_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": toy.dense,
        "feed_forward_length": 2 * toy.shared,
        "expert_shared_count": _SHARED_COUNT,
        "expert_shared_feed_forward_length": _SHARED_COUNT * toy.intermediate,
    }


def _ernie_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    shared = _SHARED_COUNT * toy.intermediate
    return {
        **attention(toy, draw),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **feed_forward(toy, draw, layer, dense=2 * toy.shared, shared=shared, biased=True),
    }


def _granite_keys(toy: ToyArch) -> dict[str, Any]:
    width = {"feed_forward_length": toy.intermediate, "expert_feed_forward_length": None}
    if not toy.experts:
        width |= NO_EXPERTS | {"feed_forward_length": toy.shared}
    return width | {
        "expert_shared_feed_forward_length": toy.shared if toy.shared and toy.experts else None,
        "attention.scale": 0.3,
        "embedding_scale": 2.5,
        "residual_scale": 0.4,
        "logit_scale": 0.75,
    }


def _granite_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = {**attention(toy, draw), "ffn_norm.weight": draw.gain(toy.hidden)}
    if not toy.experts:
        return weights | toy_parts.dense(toy, draw, toy.shared, "")
    return {
        **weights,
        **feed_forward(toy, draw, layer, shared=toy.shared),
    }


def _granite_swa_keys(toy: ToyArch) -> dict[str, Any]:
    """Windows in all layers but the first of every four."""
    return _granite_keys(toy) | {
        "attention.sliding_window": toy.window,
        "attention.sliding_window_pattern": [layer % 4 > 0 for layer in range(toy.layers)],
        "rope.dimension_count": toy.head_dim,
    }


def _granite_swa_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """Gate and up of the shared expert are one tensor."""
    weights = _granite_layer(toy, draw, layer)
    weights["attn_sinks.weight"] = draw.vector(toy.heads, spread=1.0, mean=1.0)
    if toy.biased:
        for part in ("q", "k", "v", "output"):
            rows = len(weights[f"attn_{part}.weight"])
            weights[f"attn_{part}.bias"] = draw.vector(rows, spread=0.3)
    if "ffn_gate_shexp.weight" in weights:
        both = [weights.pop(f"ffn_{role}_shexp.weight") for role in ("gate", "up")]
        weights["ffn_up_shexp.weight"] = np.concatenate(both)
    if toy.fused:
        both = [weights.pop(f"ffn_{role}_exps.weight") for role in ("gate", "up")]
        weights["ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    return weights


def _dots_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    return {
        **attention(toy, draw, "head"),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **_sigmoid_experts(toy, draw, layer),
    }


def _bailing_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = attention(toy, draw, "head")
    q, k, v = (weights.pop(f"attn_{part}.weight") for part in ("q", "k", "v"))
    return {
        **weights,
        "attn_qkv.weight": np.concatenate((q, k, v)),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **_sigmoid_experts(toy, draw, layer),
    }


def _hunyuan_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "feed_forward_length": toy.intermediate,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": toy.intermediate,
    }


def _hunyuan_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    return {
        **attention(toy, draw, "head"),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **feed_forward(toy, draw, layer, shared=toy.intermediate),
    }


def _plain_keys(toy: ToyArch) -> dict[str, Any]:
    """Of softmax routers with shared experts behind leading dense layers."""
    return {
        "expert_shared_count": _SHARED_COUNT,
        "leading_dense_block_count": toy.dense,
        "feed_forward_length": 2 * toy.shared,
        "expert_weights_scale": 1.0,
        "rope.dimension_count": toy.head_dim,
    }


def _bailing1_keys(toy: ToyArch) -> dict[str, Any]:
    return _plain_keys(toy) | {"expert_weights_norm": True, "expert_weights_scale": 1.5}


def _plain_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    shared = _SHARED_COUNT * toy.intermediate
    return {
        **attention(toy, draw),
        "ffn_norm.weight": draw.gain(toy.hidden),
        **feed_forward(toy, draw, layer, dense=2 * toy.shared, shared=shared),
    }


def _afmoe_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        **_partial_sigmoid_keys(toy),
        "expert_shared_count": _SHARED_COUNT if toy.shared else 0,
        "feed_forward_length": 2 * toy.intermediate,
        "attention.sliding_window": toy.window,
    }


def _afmoe_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    shared = _SHARED_COUNT * toy.intermediate if toy.shared else 0
    weights = feed_forward(toy, draw, layer, dense=2 * toy.intermediate, shared=shared, biased=True)
    return {
        **attention(toy, draw, "head"),
        "attn_gate.weight": draw.matrix(toy.heads * toy.head_dim, toy.hidden, gain=2.0),
        **{f"{name}.weight": draw.gain(toy.hidden) for name in _AFMOE_NORMS},
        **weights,
    }


def _exaone_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        **_sigmoid_keys(toy),
        "expert_shared_feed_forward_length": _SHARED_COUNT * toy.intermediate,
        "attention.sliding_window": toy.window,
    }


def _hy_v3_keys(toy: ToyArch) -> dict[str, Any]:
    return {
        "feed_forward_length": 2 * toy.shared,
        "expert_shared_feed_forward_length": _SHARED_COUNT * toy.intermediate,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
    }


def _hy_v3_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = _dots_layer(toy, draw, layer)
    if "exp_probs_b.bias" in weights:
        weights["exp_probs_b"] = weights.pop("exp_probs_b.bias")
    return weights


def _mellum_keys(toy: ToyArch) -> dict[str, Any]:
    return {"feed_forward_length": 2 * toy.intermediate} | (
        {"attention.sliding_window": toy.window} if toy.window else {}
    )


def _llama4_keys(toy: ToyArch) -> dict[str, Any]:
    """A window of 0 is left out: chunks are of 8192 tokens then."""
    return {
        "interleave_moe_layer_step": toy.dense + 1,
        "feed_forward_length": 2 * toy.shared,
        "rope.dimension_count": toy.head_dim,
    } | ({"attention.sliding_window": toy.window} if toy.window else {})


def _llama4_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    """So many dense layers before each routed one."""
    weights = {**attention(toy, draw), "ffn_norm.weight": draw.gain(toy.hidden)}
    if (layer + 1) % (toy.dense + 1):
        return weights | toy_parts.dense(toy, draw, 2 * toy.shared, "")
    return weights | feed_forward(toy, draw, layer, shared=toy.intermediate)


_AFMOE_NORMS = ("post_attention_norm", "ffn_norm", "post_ffw_norm")
KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {
    "afmoe": _afmoe_keys,
    "bailingmoe": _bailing1_keys,
    "bailingmoe2": _partial_sigmoid_keys,
    "deepseek": _plain_keys,
    "dots1": _sigmoid_keys,
    "ernie4_5-moe": _ernie_keys,
    "exaone-moe": _exaone_keys,
    "glm4moe": _partial_sigmoid_keys,
    "granite": _granite_keys,
    "granite_swa": _granite_swa_keys,
    "granitemoe": _granite_keys,
    "hunyuan-moe": _hunyuan_keys,
    "hy_v3": _hy_v3_keys,
    "llama4": _llama4_keys,
    "mellum": _mellum_keys,
    "minimax-m2": _minimax_keys,
    "qwen3vlmoe": _qwen3vl_keys,
}
"""Keys by architecture, without its prefix; None takes a usual one away."""
LAYERS: dict[str, Callable[[ToyArch, Draw, int], Weights]] = {
    "afmoe": _afmoe_layer,
    "bailingmoe": _plain_layer,
    "bailingmoe2": _bailing_layer,
    "deepseek": _plain_layer,
    "dots1": _dots_layer,
    "ernie4_5-moe": _ernie_layer,
    "exaone-moe": _dots_layer,
    "glm4moe": _glm4moe_layer,
    "granite": _granite_layer,
    "granite_swa": _granite_swa_layer,
    "granitemoe": _granite_layer,
    "hunyuan-moe": _hunyuan_layer,
    "hy_v3": _hy_v3_layer,
    "llama4": _llama4_layer,
    "mellum": _qwen3vl_layer,
    "minimax-m2": _minimax_layer,
    "qwen3vlmoe": _qwen3vl_layer,
}
"""One layer's tensors by architecture, without `blk.N.`."""
