"""Qwen3moe: grouped-query attention with per-head q/k norm, every layer routed, no shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import dense_layer, read_attention, read_head_norm, routed_layer
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.kernels.whole_layer import AttentionWeights
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    num_layers, extra = read.decoder_layers(spec.num_layers)
    return replace(spec, num_layers=num_layers, num_predict_layers=extra)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return routed_layer(weights, spec, index, _attention(weights, spec, f"blk.{index}."))


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. Only the packaged demo model has one, without experts."""
    prefix = f"blk.{index}."
    width = weights.num_rows(f"{prefix}ffn_gate.weight", spec.hidden_size)
    spec = replace(spec, dense_intermediate_size=width)
    return dense_layer(weights, spec, index, _attention(weights, spec, prefix))


def _attention(weights: WeightMap, spec: ModelSpec, prefix: str) -> AttentionWeights:
    return replace(
        read_attention(weights, spec, prefix), head_norm=read_head_norm(weights, spec, prefix)
    )
