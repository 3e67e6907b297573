"""Exaone-moe: norms of heads, windows that turn and full layers that do not, sigmoid router with a bias, dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_normed_attention, read_rope_factors
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec, near_or_far, with_windows

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# Where the file names no pattern, layers 3, 7, 11, ... see all tokens.
_PERIOD = 4


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. The width of shared experts is that of a routed one where the file says none."""
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    read.require_equal("rope.dimension_count", spec.head_dim)
    spec = replace(with_windows(read, spec, _PERIOD, spec.rope_scaling), own_rotary_dims=0)
    width = read.count("expert_shared_feed_forward_length", default=0)
    shared = shared_width(read, spec.num_layers, width or spec.expert_intermediate_size)
    return mixed_spec(read, spec, gating=read.gating(), shared=shared, num_dense=0)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    attention, rope = near_or_far(spec, index, attention, None)
    if factors := read_rope_factors(weights, spec.head_dim):
        rope = rope and replace(rope, factors=factors)
    return replace(mixed_layer(weights, spec, index, attention), rope=rope)
