"""Where a chunk's keys and values lie in a device's cache, in which the parts of all layers alternate. Pure.

A block of the cache is one run of memory: the keys of its first layer, its values, the keys of the next. In the array of
one layer's keys, which goes on over all others, the next block so lies a stride further on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline.messages import CachePlaces
from thermocline.models.device.steps import SparePlaces

if TYPE_CHECKING:
    from thermocline.kernels.weight import IntArray
    from thermocline.messages import Chunk


@dataclass(frozen=True, slots=True)
class BlockStrides:
    """How far apart a layer's blocks lie, in its blocks: of layers that keep all tokens, and of those with a window."""

    block_tokens: int
    full: int
    window: int

    def spare(self, places: SparePlaces) -> SparePlaces:
        """Return places for rows of padding as they lie in the cache."""
        return SparePlaces(
            places.block * self.full, places.window_block * self.window, places.state
        )

    def chunk(self, chunk: Chunk) -> Chunk:
        """Return a chunk with its places as they lie in the cache."""
        own = CachePlaces(chunk.kv_slots, chunk.segments)
        slots, segments, _ = self._places(chunk, own, self.full)
        window, branches = (
            places and self._places(chunk, places, stride)
            for places, stride in (
                (chunk.window_places, self.window),
                (chunk.branch_places, self.full),
            )
        )
        return replace(
            chunk,
            kv_slots=slots,
            segments=segments,
            window_places=window,
            branch_places=branches,
        )

    def _places(self, chunk: Chunk, places: CachePlaces, stride: int) -> CachePlaces:
        segments = []
        for segment in places.segments:
            last = int(chunk.positions[segment.start + segment.length - 1])
            table = segment.block_table[: last // self.block_tokens + 1]
            segments.append(segment._replace(block_table=table * stride))
        copies = None if places.copies is None else self._slots(places.copies, stride)
        return CachePlaces(self._slots(places.slots, stride), tuple(segments), copies)

    def _slots(self, slots: IntArray, stride: int) -> IntArray:
        blocks, rows = divmod(slots, self.block_tokens)
        found: IntArray = blocks * (stride * self.block_tokens) + rows
        return found
