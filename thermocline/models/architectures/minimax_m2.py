"""Minimax-m2: q/k norm over all heads together, half of each head turns, sigmoid router with a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import read_attention, read_wide_norm
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=True)
    return replace(
        spec,
        router=replace(spec.router, gating=read.gating(default=Gating.SIGMOID)),
        own_rotary_dims=read.rotary_dims(spec.head_dim),
    )


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention = replace(
        read_attention(weights, spec, prefix), wide_norm=read_wide_norm(weights, spec, prefix)
    )
    return mixed_layer(weights, spec, index, attention)
