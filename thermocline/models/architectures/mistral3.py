"""Mistral3: as llama without experts, with scores that grow with the position; Ministral 3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Temperature
from thermocline.kernels.whole_layer import AttentionWeights
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import dense_spec, paired_layer
from thermocline.models.rope import Yarn

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. What scores grow by begins anew with each original context."""
    read, spec = SpecReader(file), dense_spec(file)
    scaling = spec.rope_scaling
    length = read.size("rope.scaling.original_context_length", default=spec.context_length)
    scale = read.positive_float("attention.temperature_scale", default=0.0, zero=0.0)
    return replace(
        spec,
        rope_scaling=_divided(read, scaling) if isinstance(scaling, Yarn) else scaling,
        temperature=Temperature(scale, length) if scale else None,
    )


def _divided(read: SpecReader, yarn: Yarn) -> Yarn:
    """Return the scaling with its usual factor divided by that of all dimensions, which leaves 1 in published models."""
    multiplier = read.positive_float("rope.scaling.yarn_log_multiplier", default=0.0, zero=0.0)
    if not multiplier or read.has("rope.scaling.yarn_attn_factor"):
        return yarn
    divisor = 0.1 * multiplier * math.log(max(yarn.factor, 1.0)) + 1.0
    return replace(yarn, magnitude=yarn.magnitude / divisor)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    layer = paired_layer(weights, spec, index)
    attention = layer.parts.mixer
    assert isinstance(attention, AttentionWeights), "that was read"
    attention = replace(attention, temperature=spec.temperature)
    return replace(layer, parts=replace(layer.parts, mixer=attention))
