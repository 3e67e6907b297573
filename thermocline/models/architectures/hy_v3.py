"""Hy_v3: norms of heads, sigmoid router with a bias for the choice, leading dense layers, a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import read_normed_attention
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Which layers are dense the tensors alone say."""
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    read.require_equal("rope.dimension_count", spec.head_dim)
    width = read.count("expert_shared_feed_forward_length", default=0)
    shared = shared_width(read, spec.num_layers, width or spec.expert_intermediate_size)
    gating = read.gating(default=Gating.SIGMOID)
    return mixed_spec(read, spec, gating=gating, shared=shared, num_dense=0)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. The bias of the choice has no suffix."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    return mixed_layer(weights, spec, index, attention, choice_bias="exp_probs_b")


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a routed layer."""
    return read_layer(weights, spec, index)
