"""Mellum: norms of heads, every layer routed, windows in three of four layers, which turn as before any scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.blocks import plain_rope, read_normed_attention, routed_layer
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import near_or_far, with_windows

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# Where the file names no pattern, layers 3, 7, 11, ... see all tokens.
_PERIOD = 4


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. A file without a window has none in any layer."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    if not read.count("attention.sliding_window", default=0):
        return spec
    return with_windows(read, spec, _PERIOD)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    attention, rope = near_or_far(spec, index, attention, plain_rope(spec))
    return routed_layer(weights, spec, index, attention, rope=rope)
