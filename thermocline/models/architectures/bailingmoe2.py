"""Bailingmoe2: sigmoid router with a bias and groups of experts, part of each head turns, leading dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_attention, read_head_norm
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`.

    The width of a shared expert is that of a routed one where the file says none. Of two, the converter writes the
    width of both together, and llama.cpp takes it for that of one: the tensors say which it is.
    """
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    spec = replace(spec, own_rotary_dims=read.rotary_dims(spec.head_dim))
    width = read.count("expert_shared_feed_forward_length", default=0)
    stated = read.size("expert_shared_count") * (width or spec.expert_intermediate_size)
    shared = shared_width(read, spec.num_layers, stated)
    return mixed_spec(read, spec, gating=read.gating(), shared=shared)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention = replace(
        read_attention(weights, spec, prefix), head_norm=read_head_norm(weights, spec, prefix)
    )
    return mixed_layer(weights, spec, index, attention)
