"""Smollm3: as llama without experts, but every fourth layer's heads do not turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.models.mixed_layers import dense_spec, paired_layer

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_PERIOD: Final = 4
"""No key says it: the published model has it, and llama.cpp takes it for granted."""


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    return dense_spec(file)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    layer = paired_layer(weights, spec, index)
    return layer if (index + 1) % _PERIOD else replace(layer, rope=None)
