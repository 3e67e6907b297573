"""Hunyuan 4: independent residual streams, gated latent attention with sinks, to positions that an indexer chooses in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.whole_layer import NO_NORM
from thermocline.models.expert_limits import limited_layer, with_limits
from thermocline.models.indexer import (
    TYPES_KEY,
    read_sparse_attention,
    routed_spec,
    with_flagged_layers,
    with_indexer,
)
from thermocline.models.latent import latent_rope, read_latent_attention
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer
from thermocline.models.streams import independent_streams, read_layer_streams

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Files that read all positions name no indexer."""
    read = SpecReader(file, is_latent=True)
    read.refuse_rope_scaling()
    spec = routed_spec(read, gating=read.gating())
    assert spec.latent is not None, "its attention is latent"
    spec = replace(
        with_limits(read, file, spec, before=True),
        latent=replace(spec.latent, sinks=True),
        streams=independent_streams(read),
    )
    if not read.count("attention.indexer.top_k", default=0):
        return spec
    spec = with_indexer(read, spec, pairs=True)
    assert spec.indexer is not None, "it has one now"
    # Its norm has the epsilon of all others.
    indexer = replace(spec.indexer, turns_last=True, epsilon=spec.rms_epsilon)
    flags = read.required_flags(TYPES_KEY, spec.num_layers)
    return with_flagged_layers(read, replace(spec, indexer=indexer), flags)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. Its attention has a gate for each number of a head."""
    prefix, latent = f"blk.{index}.", spec.latent
    assert latent is not None, "its attention is latent"
    if spec.indexer is None:
        attention = read_latent_attention(weights, spec, prefix)
    else:
        attention = read_sparse_attention(weights, spec, index)
    width = spec.num_heads * latent.value_dim
    attention = replace(
        attention,
        gate=weights.matrix(f"{prefix}attn_gate.weight", width, spec.hidden_size),
        sinks=weights.vector(f"{prefix}attn_sinks.weight", spec.num_heads),
    )
    layer = mixed_layer(weights, spec, index, attention, rope=latent_rope(spec))
    layer = limited_layer(weights, spec, index, layer)
    streams = read_layer_streams(weights, spec, index)
    return replace(layer, parts=replace(layer.parts, norm=NO_NORM, streams=streams))
