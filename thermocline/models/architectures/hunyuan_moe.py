"""Hunyuan-moe: per-head q/k norm behind the rotary embedding, a shared expert without a gate in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import read_turned_normed_attention
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. The shared expert is as wide as a dense layer where the file says no width."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.require_equal("expert_gating_func", int(Gating.SOFTMAX))
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    width = read.count("expert_shared_feed_forward_length", default=0)
    return replace(spec, shared_intermediate_size=width or read.size("feed_forward_length"))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention, rope = read_turned_normed_attention(weights, spec, f"blk.{index}.")
    return mixed_layer(weights, spec, index, attention, rope=rope)
