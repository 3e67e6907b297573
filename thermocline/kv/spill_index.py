"""Owns what the second tier of the prefix cache holds, where, and what it drops first. Pure: moves no byte.

The tier has levels, memory before a file. A part enters the first level; the one that was needed longest ago goes on to
the next, and is dropped behind the last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

CHECKSUM_BYTES: Final = 4
"""Each place has so many behind its part."""


class PartKind(Enum):
    """What a part is of. One key may have a part of each kind."""

    BLOCK = "block"
    """A block of the layers that keep all tokens."""
    WINDOW = "window"
    """A block of the layers with a sliding window."""
    STATE = "state"
    """The state of recurrent layers behind a block."""


class PartKey(NamedTuple):
    """What a part is found by: its kind, and the key of its tokens (see kv.prefix)."""

    kind: PartKind
    tokens: bytes


class SpillPlace(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a level."""

    level: int
    offset: int
    num_bytes: int


class PartCopy(NamedTuple):
    """A part on its way between the cache and the tier. number: of the block or slot that it has in the cache."""

    key: PartKey
    number: int
    place: SpillPlace


class Demotion(NamedTuple):
    """A part that goes from one level to the next, before anything is written to its old place."""

    key: PartKey
    source: SpillPlace
    target: SpillPlace


class Extents:
    """Which bytes of [0, num_bytes) are free. Gives the lowest that fit."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        """Bytes, free or not. Only `limit` changes it."""
        self._free = [(0, num_bytes)] if num_bytes else []  # (begin, end), in order, apart

    def __repr__(self) -> str:
        return f"Extents({self.num_bytes - self.free_bytes} of {self.num_bytes} bytes used)"

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, in however many pieces."""
        return sum(end - begin for begin, end in self._free)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of so many bytes, now used; None if no piece has as many."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                if end - begin == num_bytes:
                    del self._free[index]
                else:
                    self._free[index] = (begin + num_bytes, end)
                return begin
        return None

    def free(self, offset: int, num_bytes: int) -> None:
        """Take bytes back; those behind the limit are lost."""
        begin, end = offset, min(offset + num_bytes, self.num_bytes)
        if begin >= end:
            return
        index = bisect_left(self._free, (begin, end))
        assert index == len(self._free) or end <= self._free[index][0], "bytes are free twice"
        assert not index or self._free[index - 1][1] <= begin, "bytes are free twice"
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))

    def limit(self, num_bytes: int) -> None:
        """Give no bytes from `num_bytes` on any more. What is used there stays until it is freed."""
        self.num_bytes = min(self.num_bytes, num_bytes)
        ends = [(begin, min(end, self.num_bytes)) for begin, end in self._free]
        self._free = [(begin, end) for begin, end in ends if begin < end]


@dataclass(slots=True)
class _Record:
    place: SpillPlace
    is_written: bool


class SpillIndex:
    """The parts of all levels, in each the one needed longest ago first.

    Whoever moves bytes does so in the order in which places were given out: then a place that is given away still has its
    old part for those who asked before.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        """capacities: bytes of each level, the fastest first."""
        self._extents = [Extents(num_bytes) for num_bytes in capacities]
        self._levels: list[OrderedDict[PartKey, _Record]] = [OrderedDict() for _ in capacities]
        self._used_bytes = [0] * len(self._levels)
        self.total_dropped = 0
        """Parts that went because there was no room for them."""

    def __repr__(self) -> str:
        return f"SpillIndex({', '.join(map(str, map(len, self._levels)))} parts)"

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """Bytes of each level that parts have. May be asked from any thread."""
        return tuple(self._used_bytes)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Bytes that each level has room for."""
        return tuple(extents.num_bytes for extents in self._extents)

    def find(self, key: PartKey) -> SpillPlace | None:
        """Return where a part is that is written."""
        for level in self._levels:
            record = level.get(key)
            if record is not None:
                return record.place if record.is_written else None
        return None

    def knows(self, key: PartKey) -> bool:
        """Whether a part is written, or being written."""
        return any(key in level for level in self._levels)

    def touch(self, key: PartKey) -> bool:
        """Note that a part is needed now, or is the only copy from now on; False if it is not written."""
        for level in self._levels:
            if key in level:
                level.move_to_end(key)
                return level[key].is_written
        return False

    def reserve(self, key: PartKey, num_bytes: int) -> tuple[SpillPlace | None, list[Demotion]]:
        """Return where to write a part, until `confirm` or `discard`, None without room; and what must move before."""
        assert not self.knows(key), "the part is there already"
        demotions: list[Demotion] = []
        for level, extents in enumerate(self._extents):
            if num_bytes <= extents.num_bytes:
                place = self._allocate(level, num_bytes, demotions)
                if place is not None:
                    self._put(key, _Record(place, is_written=False))
                return place, demotions
        return None, demotions

    def confirm(self, key: PartKey) -> None:
        """Note that a reserved part is written."""
        for level in self._levels:
            if key in level:
                level[key].is_written = True

    def discard(self, key: PartKey, place: SpillPlace | None = None) -> None:
        """Forget a part, if it is there; with a place only if it is at that place."""
        for level in self._levels:
            record = level.get(key)
            if record is not None and place in (None, record.place):
                self._remove(key, record)

    def limit(self, level: int, num_bytes: int) -> None:
        """Give no more than the first so many bytes of a level: the others can not be written."""
        self._extents[level].limit(num_bytes)

    def check_integrity(self) -> None:
        """Assert that parts and free bytes fill each level, once."""
        for number, (extents, level) in enumerate(zip(self._extents, self._levels, strict=True)):
            places = sorted(record.place for record in level.values())
            assert all(place.level == number for place in places), "a part is in two levels"
            for before, after in pairwise(places):
                assert before.offset + before.num_bytes <= after.offset, "parts overlap"
            assert self._used_bytes[number] == sum(place.num_bytes for place in places)
            inside = sum(
                max(0, min(place.offset + place.num_bytes, extents.num_bytes) - place.offset)
                for place in places
            )
            assert inside + extents.free_bytes == extents.num_bytes, "bytes are lost"
        keys = [key for level in self._levels for key in level]
        assert len(keys) == len(set(keys)), "a part is twice in the tier"

    def _allocate(self, level: int, num_bytes: int, demotions: list[Demotion]) -> SpillPlace | None:
        """Return free bytes of a level, after others have left it; None if those that are left are being written."""
        while True:
            offset = self._extents[level].allocate(num_bytes)
            if offset is not None:
                return SpillPlace(level, offset, num_bytes)
            records = self._levels[level].items()
            victim = next(((key, each) for key, each in records if each.is_written), None)
            if victim is None:
                return None
            key, record = victim
            self._remove(key, record)
            target = None
            below = level + 1
            if below < len(self._levels):
                target = self._allocate(below, record.place.num_bytes, demotions)
            if target is None:
                self.total_dropped += 1
            else:
                demotions.append(Demotion(key, record.place, target))
                self._put(key, _Record(target, is_written=True))

    def _put(self, key: PartKey, record: _Record) -> None:
        self._levels[record.place.level][key] = record
        self._used_bytes[record.place.level] += record.place.num_bytes

    def _remove(self, key: PartKey, record: _Record) -> None:
        level, offset, num_bytes = record.place
        del self._levels[level][key]
        self._used_bytes[level] -= num_bytes
        self._extents[level].free(offset, num_bytes)
