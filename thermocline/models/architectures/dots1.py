"""Dots1: per-head q/k norm, sigmoid router with a bias, leading dense layers, shared experts without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_attention, read_head_norm
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    read.require_equal("rope.dimension_count", spec.head_dim)
    shared = read.size("expert_shared_count") * spec.expert_intermediate_size
    return mixed_spec(read, spec, gating=read.gating(), shared=shared)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention = replace(
        read_attention(weights, spec, prefix), head_norm=read_head_norm(weights, spec, prefix)
    )
    return mixed_layer(weights, spec, index, attention)
