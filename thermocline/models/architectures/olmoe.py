"""Olmoe: q/k norm over all heads together, routing weights not renormalised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_attention, read_wide_norm, routed_layer
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=False)
    read.require_equal("rope.dimension_count", spec.head_dim)
    # The dense width is the width of an expert here.
    return replace(spec, expert_intermediate_size=read.size("feed_forward_length"))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention = replace(
        read_attention(weights, spec, prefix), wide_norm=read_wide_norm(weights, spec, prefix)
    )
    return routed_layer(weights, spec, index, attention)
