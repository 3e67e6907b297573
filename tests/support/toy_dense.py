"""Toy models of architectures whose layers are dense, or Mixtral's: what keys and tensors each has.

Knows the GGUF convention of each architecture. Knows no oracle, and not how a file is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.toy_gemma import NO_EXPERTS
from tests.support.toy_parts import attention, dense, experts, head_norms

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw, Weights


def _dense_keys(toy: ToyArch) -> dict[str, Any]:
    return NO_EXPERTS | {
        "feed_forward_length": toy.shared,
        "rope.dimension_count": toy.head_dim,
    }


def _qwen3vl_keys(toy: ToyArch) -> dict[str, Any]:
    sections = [len(range(part, toy.head_dim // 2, 3)) for part in range(3)] + [0]
    return _dense_keys(toy) | {"rope.dimension_sections": sections, "n_deepstack_layers": 0}


def _qwen2_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    weights = {**attention(toy, draw), "ffn_norm.weight": draw.gain(toy.hidden)}
    if toy.biased:
        for part in ("q", "k", "v"):
            rows = len(weights[f"attn_{part}.weight"])
            weights[f"attn_{part}.bias"] = draw.vector(rows, spread=0.3)
    return weights | dense(toy, draw, toy.shared, "")


def _qwen3_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    norms = {**head_norms(toy, draw), "ffn_norm.weight": draw.gain(toy.hidden)}
    return attention(toy, draw) | norms | dense(toy, draw, toy.shared, "")


def _llama_keys(toy: ToyArch) -> dict[str, Any]:
    own = {"feed_forward_length": toy.intermediate, "expert_feed_forward_length": None}
    return _dense_keys(toy) if not toy.experts else own | {"rope.dimension_count": toy.head_dim}


def _llama_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    if not toy.experts:
        weights = _qwen2_layer(toy, draw, layer)
        for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down") if toy.all_biased else ():
            rows = len(weights[f"{name}.weight"])
            weights[f"{name}.bias"] = draw.vector(rows, spread=0.3)
        return weights
    own = {"ffn_norm.weight": draw.gain(toy.hidden), **experts(toy, draw)}
    return attention(toy, draw) | own


KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {
    "ernie4_5": _dense_keys,
    "hunyuan-dense": _dense_keys,
    "llama": _llama_keys,
    "mistral3": _dense_keys,
    "qwen2": _dense_keys,
    "qwen3": _dense_keys,
    "qwen3vl": _qwen3vl_keys,
    "smollm3": _dense_keys,
}
LAYERS: dict[str, Callable[[ToyArch, Draw, int], Weights]] = {
    "ernie4_5": _llama_layer,
    "hunyuan-dense": _qwen3_layer,
    "llama": _llama_layer,
    "mistral3": _llama_layer,
    "qwen2": _qwen2_layer,
    "qwen3": _qwen3_layer,
    "qwen3vl": _qwen3_layer,
    "smollm3": _llama_layer,
}
