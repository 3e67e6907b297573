"""Chunks whose tokens lie in places that no request has, for trying a device. Knows no device and no request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import CachePlaces, Chunk, ChunkId, RequestId, Segment, StateUse
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from thermocline.kernels.weight import IntArray
    from thermocline.messages import SegmentKind
    from thermocline.models.device.steps import SparePlaces


def spare_chunk(
    number: int,
    kind: SegmentKind,
    positions: IntArray,
    places: SparePlaces,
    block_tokens: int,
    *,
    num_sequences: int = 1,
    is_drafted: bool = False,
) -> Chunk:
    """Return a chunk of equal sequences, under a number that no request's chunk has.

    is_drafted: the tokens behind each one's first are, and the state after each goes to the one that there is.
    Every block of a sequence is the one in `places`: positions a block apart share a slot.
    """
    length, num_drafted = len(positions), len(positions) - 1 if is_drafted else 0
    saves = tuple((count, places.state) for count in range(1, num_drafted + 1))
    state = StateUse(places.state, saves=saves)
    num_blocks = ceil_div(int(positions[-1]) + 1, block_tokens)
    every = np.tile(positions, num_sequences).astype(np.int32)

    def lying_in(block: int) -> CachePlaces:
        table = np.full(num_blocks, block, np.int32)
        segments = tuple(
            Segment(
                *(RequestId(0), row * length, length, kind, table, length, state),
                num_drafted=num_drafted,
            )
            for row in range(num_sequences)
        )
        return CachePlaces(every % block_tokens + np.int32(block * block_tokens), segments)

    full = lying_in(places.block)
    return Chunk(
        ChunkId(-1 - number),
        full.segments,
        every,
        every,
        full.slots,
        every,
        window_places=lying_in(places.window_block) if places.window_block else None,
    )
