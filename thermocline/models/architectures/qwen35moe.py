"""Qwen35moe: gated delta rule and gated attention in turns, value heads stored tiled, a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.gated_delta import hybrid_layer, read_hybrid_spec, tiled_layer

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    return read_hybrid_spec(file, tiled=True)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return tiled_layer(weights, spec, index)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It attends, whatever the interval says."""
    return hybrid_layer(weights, spec, index, None)
