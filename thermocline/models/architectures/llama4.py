"""Llama4: chunks of tokens that turn, full layers that do not, one routed expert whose input is weighed, and a shared one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.dense_contract import Gating, HeadNorm, Temperature
from thermocline.models.blocks import read_attention, read_rope_factors
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec, near_or_far, with_windows

if TYPE_CHECKING:
    from thermocline.kernels.whole_layer import AttentionWeights
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# What no converter writes: the published models have it, and llama.cpp takes it for granted.
_PERIOD: Final = 4
"""The last of so many layers sees all tokens and does not turn."""
_CHUNK_TOKENS: Final = 8192
_TEMPERATURE: Final = Temperature(0.1, 8192, offset=1)
_EXPERTS_WITHOUT_NORM: Final = 128
"""Maverick's, which has no norms of heads; Scout has 16, and norms."""


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Files may say a chunk and a temperature of their own by the usual keys."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.refuse("attention.sliding_window_pattern")
    read.require_equal("expert_gating_func", int(Gating.SIGMOID))
    read.require_equal("expert_used_count", 1)
    read.size("interleave_moe_layer_step")  # the tensors say it, too
    spec = read.decoder(normalize_top_k=False)
    read.require_equal("rope.dimension_count", spec.head_dim)
    spec = with_windows(read, spec, _PERIOD, spec.rope_scaling, size=_CHUNK_TOKENS)
    assert spec.window is not None, "it was just given"
    spec = replace(
        spec,
        own_rotary_dims=0,
        window=replace(spec.window, chunked=True),
        temperature=_temperature(read),
    )
    shared = shared_width(read, spec.num_layers, spec.expert_intermediate_size)
    return mixed_spec(read, spec, gating=Gating.SIGMOID, shared=shared, scaled=False, num_dense=0)


def _temperature(read: SpecReader) -> Temperature | None:
    scale = read.positive_float("attention.temperature_scale", _TEMPERATURE.scale, zero=0.0)
    length = read.size("attention.temperature_length", _TEMPERATURE.length)
    return replace(_TEMPERATURE, scale=scale, length=length) if scale else None


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. Norms of turned heads have no gains in the file."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    attention, rope = near_or_far(spec, index, attention, None)
    if rope is None:
        attention = replace(attention, temperature=spec.temperature)
    else:
        factors = read_rope_factors(weights, spec.head_dim)
        rope = replace(rope, pairs=True, factors=factors)
        attention = _normed(spec, attention)
    layer = mixed_layer(weights, spec, index, attention)
    parts = layer.parts
    if parts.routed is not None:
        parts = replace(parts, routed=replace(parts.routed, weighs_input=True))
    return replace(layer, parts=parts, rope=rope)


def _normed(spec: ModelSpec, attention: AttentionWeights) -> AttentionWeights:
    if spec.router.num_experts == _EXPERTS_WITHOUT_NORM:
        return attention
    ones = np.ones(spec.head_dim, np.float32)
    return replace(attention, head_norm=HeadNorm(ones, ones, spec.rms_epsilon, last=True))
