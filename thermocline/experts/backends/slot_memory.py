"""Owns the free slots of a device's expert memory: equal slots for each layout, and spare ones that fit any. Pure.

A slot's number is its offset in units common to all layouts, so kernels find every slot from one base address. Slots
in segments of the KV cache come and go with the segment. Knows no device.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING

from thermocline.errors import DeviceMemoryError
from thermocline.experts.placement.slots import UNIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thermocline.experts.placement.slots import LayoutSlots


class SlotMemory:
    """Free slots of each layout, and spare ones for layouts without a free slot. From any thread."""

    def __init__(
        self,
        layouts: Mapping[str, LayoutSlots],
        num_spare: int,
        segments: Sequence[tuple[str, range]] = (),
    ) -> None:
        """segments: behind all other slots, in order; of each its layout and slots. All are open."""
        self._layouts = dict(layouts)
        self._free: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        end = 0
        for name, slots in layouts.items():
            self._free[name] = [end + n * slots.units for n in range(slots.count)]
            end += slots.count * slots.units
        self._spare_from = end
        largest = max((slots.units for slots in layouts.values()), default=0)
        self._spare = [end + n * largest for n in range(num_spare)]
        end += num_spare * largest
        self.total_bytes = end * UNIT_BYTES
        """Of all slots that are in no segment."""
        self.resident_bytes = sum(slots.count * slots.expert_bytes for slots in layouts.values())
        self._segments = tuple(segments)
        self._starts = [slots.start for _, slots in segments]
        assert self._starts == sorted(self._starts), "segments are out of order"
        assert not segments or self._starts[0] >= end, "a segment overlaps other slots"
        self._is_open = [True] * len(segments)
        # Slots of each segment that are not free.
        self._num_taken = [0] * len(segments)
        # Of open segments, negative: the last one first, which the cache takes back last.
        self._lent_free: dict[str, list[int]] = {name: [] for name in layouts}
        for layout, segment in segments:
            self._lent_free[layout] += [-slot for slot in segment]
        for heap in self._lent_free.values():
            heapq.heapify(heap)
        self.on_closed: Callable[[], None] = lambda: None
        """Called, from any thread, when the last slot of a closed segment was given back."""

    def __repr__(self) -> str:
        heaps = (*self._free.values(), *self._lent_free.values(), self._spare)
        free, num_open = sum(map(len, heaps)), sum(self._is_open)
        lent = f", {num_open} of {len(self._segments)} segments" if self._segments else ""
        return f"SlotMemory({len(self._layouts)} layouts, {self.total_bytes} bytes{lent}, {free} slots free)"

    @property
    def num_closing(self) -> int:
        """Closed segments of which slots are not free yet."""
        pairs = zip(self._is_open, self._num_taken, strict=True)
        return sum(not is_open and taken > 0 for is_open, taken in pairs)

    def shares(self) -> dict[str, int]:
        """Return the bytes of experts that each layout has slots for now, spare ones apart."""
        counts = {name: slots.count for name, slots in self._layouts.items()}
        for (layout, slots), is_open in zip(self._segments, self._is_open, strict=True):
            counts[layout] += len(slots) if is_open else 0
        return {name: count * self._layouts[name].expert_bytes for name, count in counts.items()}

    def allocate(self, layout: str) -> int:
        """Return where a free slot begins, in units. Raises DeviceMemoryError."""
        with self._lock:
            free = self._free[layout]
            if not free and self._lent_free[layout]:
                slot = -heapq.heappop(self._lent_free[layout])
                self._num_taken[self._segment_of(slot)] += 1
                return slot
            free = free or self._spare
            if not free:
                raise DeviceMemoryError("one more expert", self._layouts[layout].expert_bytes)
            return heapq.heappop(free)

    def take_spare(self, count: int) -> list[int]:
        """Return so many spare slots, which fit any layout, and are not given back."""
        with self._lock:
            assert count <= len(self._spare), "there are not so many spare slots"
            return [heapq.heappop(self._spare) for _ in range(count)]

    def free(self, layout: str, slot: int) -> None:
        """Take a slot back."""
        is_closed = False
        with self._lock:
            if not self._starts or slot < self._starts[0]:
                heapq.heappush(
                    self._spare if slot >= self._spare_from else self._free[layout], slot
                )
            else:
                segment = self._segment_of(slot)
                self._num_taken[segment] -= 1
                if self._is_open[segment]:
                    heapq.heappush(self._lent_free[layout], -slot)
                else:
                    is_closed = not self._num_taken[segment]
        if is_closed:
            self.on_closed()

    def close(self, segment: int) -> range:
        """Give out no more slots of a segment, and return those that it has."""
        with self._lock:
            assert self._is_open[segment], f"segment {segment} is closed"
            self._is_open[segment] = False
            layout, slots = self._segments[segment]
            self._lent_free[layout] = [
                each for each in self._lent_free[layout] if -each not in slots
            ]
            heapq.heapify(self._lent_free[layout])
            return slots

    def open(self, segment: int) -> None:
        """Give out the slots of a closed segment again."""
        with self._lock:
            assert not self._is_open[segment], f"segment {segment} is open"
            assert not self._num_taken[segment], f"slots of segment {segment} are in use"
            self._is_open[segment] = True
            layout, slots = self._segments[segment]
            for slot in slots:
                heapq.heappush(self._lent_free[layout], -slot)

    def _segment_of(self, slot: int) -> int:
        return bisect_right(self._starts, slot) - 1
