"""Nemotron's blocks, each of which is a mixer or a feed-forward alone: Mamba2, attention that does not turn, or neither.

Knows their kinds and how one with a mixer is read, not what feed-forward the others have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.whole_layer import LayerParts
from thermocline.models.blocks import read_attention
from thermocline.models.decoder import DecoderLayer
from thermocline.models.mamba import read_mamba
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.models.weights import WeightMap


def block_kinds(kv_heads: Sequence[int], widths: Sequence[int]) -> tuple[LayerKind, ...]:
    """Return the blocks' kinds. A block with a feed-forward has no mixer, whatever else its keys say."""
    return tuple(map(_kind, kv_heads, widths))


def _kind(kv_heads: int, width: int) -> LayerKind:
    if width:
        return LayerKind.NONE
    return LayerKind.ATTENTION if kv_heads else LayerKind.RECURRENT


def read_mixer_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """Return a block that is a mixer alone."""
    prefix = f"blk.{index}."
    is_recurrent = spec.layer_kinds[index] is LayerKind.RECURRENT
    read = read_mamba if is_recurrent else read_attention
    parts = LayerParts(read(weights, spec, prefix), None, spec.rms_epsilon, None)
    return DecoderLayer(parts, None, None)
