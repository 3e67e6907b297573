"""Granite without experts: neighbouring dimensions turn together; factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    read.refuse_other_attention()
    read.require_rotary()
    spec = read.dense_decoder()
    read.require_equal("rope.dimension_count", spec.head_dim)
    return with_factors(read, spec, logit_scale=None)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return paired_layer(weights, spec, index)
