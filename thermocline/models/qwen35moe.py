"""Qwen35moe: gated delta rule and gated attention in turns, value heads stored tiled, a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.gated_delta import delta_shape, hybrid_layer, read_hybrid_spec
from thermocline.models.spec import LayerKind

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
    if spec.layer_kinds[index] is not LayerKind.RECURRENT:
        return hybrid_layer(weights, spec, index, None)
    alpha, beta = (
        weights.matrix(
            f"blk.{index}.ssm_{part}.weight", delta_shape(spec).value_heads, spec.hidden_size
        )
        for part in ("alpha", "beta")
    )
    return hybrid_layer(weights, spec, index, (alpha, beta))


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It attends, whatever the interval says."""
    return hybrid_layer(weights, spec, index, None)
