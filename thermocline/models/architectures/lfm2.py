"""Lfm2: short convolutions and attention in turns, and no routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer
from thermocline.models.short_convolutions import key_heads, read_mixer, with_convolutions

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Its models of embeddings, whose tokens see later ones, are refused."""
    read = SpecReader(file)
    read.refuse_other_attention()
    kv_heads, num_kv_heads = key_heads(read)
    return with_convolutions(read, read.dense_decoder(num_kv_heads=num_kv_heads), kv_heads)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    mixer, rope = read_mixer(weights, spec, index)
    return mixed_layer(weights, spec, index, mixer, rope=rope)
