"""Qwen3next: gated delta rule and gated attention in turns, value heads stored in groups, a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.models.gated_delta import delta_shape, hybrid_layer, read_hybrid_spec
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    return read_hybrid_spec(file, tiled=False)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    if spec.layer_kinds[index] is not LayerKind.RECURRENT:
        return hybrid_layer(weights, spec, index, None)
    shape = delta_shape(spec)
    heads, groups = shape.value_heads, shape.key_heads
    both = weights.matrix(f"blk.{index}.ssm_ba.weight", 2 * heads, spec.hidden_size)
    # Of each key head first the betas of its value heads, then their alphas.
    rows = np.arange(2 * heads, dtype=np.int32).reshape(groups, 2, -1)
    beta, alpha = (weights.part(both, rows[:, part].reshape(-1)) for part in (0, 1))
    return hybrid_layer(weights, spec, index, (alpha, beta))


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It attends, whatever the interval says."""
    return hybrid_layer(weights, spec, index, None)
