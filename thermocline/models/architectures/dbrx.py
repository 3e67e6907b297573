"""Dbrx: norms that take the mean off, q, k and v in one tensor and limited in size, a softmax router, no shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_attention, routed_layer
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. No key says that the weights of chosen experts sum to one, as they do."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.refuse_other_attention()
    read.refuse_rope_scaling()
    spec = read.decoder(
        normalize_top_k=True,
        width=read.size("feed_forward_length"),
        epsilon=read.positive_float("attention.layer_norm_epsilon"),
    )
    read.require_equal("rope.dimension_count", spec.head_dim)
    clip = read.positive_float("attention.clamp_kqv", zero=0.0)
    return replace(spec, norms_center=True, attention_clip=clip)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. The norm before the experts is called that of attention's output."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    attention = replace(attention, clip=spec.attention_clip)
    return routed_layer(weights, spec, index, attention, norm="attn_output_norm")
