"""Qwen3vlmoe: the text part of Qwen3-VL with experts, which is qwen3moe with positions of several axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.blocks import read_normed_attention, routed_layer
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Text stands at the same position on every axis, and adds nothing to deep layers."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    return spec


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    return routed_layer(weights, spec, index, attention)
