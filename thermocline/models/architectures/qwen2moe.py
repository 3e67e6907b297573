"""Qwen2moe: biased q, k and v, a shared expert behind a sigmoid, routing weights not renormalised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_attention, read_shared, routed_layer
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Files of old converters do not say how wide the shared expert is."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=False)
    read.require_equal("rope.dimension_count", spec.head_dim)
    key = "expert_shared_feed_forward_length"
    width = 0 if read.has(key) else shared_width(read, spec.num_layers, 0)
    shared = width or read.size(key)
    return replace(spec, shared_intermediate_size=shared)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention = read_attention(weights, spec, prefix)
    gate = weights.row(prefix + "ffn_gate_inp_shexp.weight", spec.hidden_size)
    shared = replace(read_shared(weights, spec, prefix), gate=gate)
    return routed_layer(weights, spec, index, attention, shared)
