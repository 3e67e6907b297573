"""Granitemoe: neighbouring dimensions turn together; factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import paired_layer, with_factors

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.require_equal("expert_gating_func", int(Gating.SOFTMAX))
    read.require_rotary()
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    spec = replace(
        spec,
        expert_intermediate_size=read.size("feed_forward_length"),
        shared_intermediate_size=read.count("expert_shared_feed_forward_length", default=0),
    )
    return with_factors(read, spec, logit_scale=None)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return paired_layer(weights, spec, index)
