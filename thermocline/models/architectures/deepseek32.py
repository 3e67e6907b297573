"""DeepSeek-V3.2: DeepSeek-V3's layers, whose attention reads the positions that an indexer chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.indexer import sparse_layer, sparse_spec
from thermocline.models.metadata import SpecReader

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. The heads of its indexer turn by halves, those of its attention in pairs."""
    read = SpecReader(file, is_latent=True)
    return sparse_spec(read, gating=read.gating(), pairs=False)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return sparse_layer(weights, spec, index)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a routed layer, and reads all positions."""
    return sparse_layer(weights, spec, index)
