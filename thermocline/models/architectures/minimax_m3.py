"""MiniMax-M3: norms of heads, part of each turns, clamped SwiGLU everywhere, and key heads that each read chosen blocks.

Layers with experts choose; first layers are dense and read all positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.weight import ExpertActivation
from thermocline.models.blocks import plain_rope, read_normed_attention
from thermocline.models.head_blocks import read_head_indexer, with_head_indexer
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
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm", default=False))
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    gating, is_scaled = read.gating(default=Gating.SIGMOID), read.has("expert_weights_scale")
    num_dense = read.leading_dense(spec.num_layers, 0)
    spec = mixed_spec(
        read, spec, gating=gating, shared=shared, scaled=is_scaled, num_dense=num_dense
    )
    spec = replace(
        spec,
        expert_activation=ExpertActivation.CLAMPED_SILU,
        own_rotary_dims=read.rotary_dims(spec.head_dim),
    )
    return with_head_indexer(read, spec)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    attention = replace(attention, indexer=read_head_indexer(weights, spec, index))
    return mixed_layer(weights, spec, index, attention, rope=plain_rope(spec))
