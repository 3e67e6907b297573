"""Glm4moe: biased q, k and v, half of each head turns, sigmoid router with a bias, leading dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import read_attention, read_head_norm
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Files of the vision models divide the turning pairs among axes, equal for text.

    Solar-Open's may not name dense layers, of which it has none.
    """
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    spec = replace(spec, own_rotary_dims=read.rotary_dims(spec.head_dim))
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    gating = read.gating(default=Gating.SIGMOID)
    return mixed_spec(read, spec, gating=gating, shared=shared, num_dense=0)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. The larger models have norms of heads, the smaller ones have none."""
    prefix = f"blk.{index}."
    attention = read_attention(weights, spec, prefix)
    if prefix + "attn_q_norm.weight" in weights:
        attention = replace(attention, head_norm=read_head_norm(weights, spec, prefix))
    return mixed_layer(weights, spec, index, attention, norm="post_attention_norm")


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a routed layer."""
    return read_layer(weights, spec, index)
