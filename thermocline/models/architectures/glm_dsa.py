"""GLM-5, 5.1 and 5.2: attention reads the positions that an indexer chooses, of the layer or of an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.indexer import (
    TYPES_KEY,
    sparse_layer,
    sparse_spec,
    with_flagged_layers,
)
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# The first files of GLM-5.2, which is the one with contexts so long, do not say which layers choose.
_LONG_CONTEXT, _FIRST_SHARED, _PERIOD = 1 << 20, 2, 4


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Files without a gating function mean sigmoids."""
    read = SpecReader(file, is_latent=True)
    spec = sparse_spec(read, gating=read.gating(default=Gating.SIGMOID), pairs=True)
    flags = read.layer_flags(TYPES_KEY, spec.num_layers)
    if not flags and spec.context_length >= _LONG_CONTEXT:
        flags = tuple(
            n < _FIRST_SHARED or (n - _FIRST_SHARED) % _PERIOD == 0 for n in range(spec.num_layers)
        )
    if not flags:
        return spec
    return with_flagged_layers(read, spec, flags)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return sparse_layer(weights, spec, index)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a routed layer, and reads all positions."""
    return sparse_layer(weights, spec, index)
