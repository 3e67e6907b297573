"""Llama, and Mixtral: plain grouped-query attention whose neighbouring dimensions turn together, with experts or without."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import (
    dense_layer,
    plain_rope,
    read_attention,
    read_rope_factors,
    routed_layer,
)
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Mixtral's files do not say how wide an expert is apart from the feed-forward."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.refuse_other_attention()
    read.require_equal("expert_shared_count", 0)
    if read.count("expert_count", default=0):
        spec = read.decoder(normalize_top_k=True)
        spec = replace(spec, expert_intermediate_size=read.size("feed_forward_length"))
    else:
        spec = read.dense_decoder()
    read.require_equal("rope.dimension_count", spec.head_dim)
    usual = spec.attention_scale
    scale = read.positive_float("attention.scale", default=usual, zero=usual)
    return replace(spec, own_attention_scale=scale)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    factors = read_rope_factors(weights, spec.head_dim)
    rope = replace(plain_rope(spec), pairs=True, factors=factors)
    if spec.has_experts:
        return routed_layer(weights, spec, index, attention, rope=rope)
    return dense_layer(weights, spec, index, attention, rope)
