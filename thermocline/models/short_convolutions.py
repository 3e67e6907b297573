"""Short convolutions and attention in turns, as LFM2's models mix tokens, with experts or without.

Knows the mixers' keys and tensors, not what feed-forward is behind them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.recurrent_contract import ShortConvRule, ShortConvShape
from thermocline.kernels.whole_layer import AttentionWeights, RecurrentWeights
from thermocline.models.blocks import plain_rope, read_normed_attention
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.models.metadata import SpecReader
    from thermocline.models.rope import RopeRule
    from thermocline.models.weights import WeightMap


def key_heads(read: SpecReader) -> tuple[tuple[int, ...], int]:
    """Return by layer how many heads of keys it has, 0 for a convolution, and how many those that attend have."""
    return read.attention_heads("attention.head_count_kv", read.size("block_count"))


def with_convolutions(read: SpecReader, spec: ModelSpec, kv_heads: tuple[int, ...]) -> ModelSpec:
    """Return `spec` with the layers' kinds: one without keys and values has a convolution."""
    kinds = tuple(LayerKind.ATTENTION if heads else LayerKind.RECURRENT for heads in kv_heads)
    return replace(
        spec,
        own_layer_kinds=kinds,
        own_rotary_dims=read.rotary_dims(spec.head_dim, default=spec.head_dim),
        recurrent=ShortConvShape(spec.hidden_size, read.size("shortconv.l_cache", least=2)),
        output_norm="token_embd_norm.weight",
    )


def read_mixer(
    weights: WeightMap, spec: ModelSpec, index: int
) -> tuple[AttentionWeights | RecurrentWeights, RopeRule | None]:
    """Return a layer's mixer, and how its heads turn."""
    prefix = f"blk.{index}."
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        return _convolution(weights, spec, prefix), None
    return read_normed_attention(weights, spec, prefix), plain_rope(spec)


def _convolution(weights: WeightMap, spec: ModelSpec, prefix: str) -> RecurrentWeights:
    shape, hidden = spec.recurrent, spec.hidden_size
    assert isinstance(shape, ShortConvShape)
    conv = weights.array(prefix + "shortconv.conv.weight", (hidden, shape.conv_width))
    return RecurrentWeights(
        norm=weights.vector(prefix + "attn_norm.weight", hidden),
        epsilon=spec.rms_epsilon,
        input=weights.matrix(prefix + "shortconv.in_proj.weight", shape.row, hidden),
        output=weights.matrix(prefix + "shortconv.out_proj.weight", hidden, hidden),
        rule=ShortConvRule(shape, np.ascontiguousarray(conv.T)),
    )
