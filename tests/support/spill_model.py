"""A second tier of named prefixes instead of bytes, whose jobs run and end whenever a test says so.

Every byte of a place knows of which copy it is, so that a place which was given away too early, or a part that was
copied while its slots changed, is seen by the cache model.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tests.support.cache_model import GARBAGE
from thermocline.kv.spill_index import PartKind
from thermocline.pipeline.scheduling.request_spill import SpillRead, SpillWrite

if TYPE_CHECKING:
    from tests.support.cache_model import CacheModel
    from thermocline.kv.spill_index import PartCopy, PartKey, SpillPlace
    from thermocline.pipeline.scheduling.request_spill import RequestSpill


class SpillModel:
    """Carries out what a scheduler's second tier decides, in its order."""

    def __init__(self, spill: RequestSpill, model: CacheModel) -> None:
        self.spill = spill
        self.model = model
        self._bytes: dict[tuple[int, int], tuple[PartKey, tuple[object, ...], int]] = {}
        self._jobs = deque[SpillRead | SpillWrite]()
        self._ran = deque[tuple[SpillRead | SpillWrite, list[object]]]()
        self.num_returned = 0

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs) + len(self._ran)

    def take(self) -> None:
        """Take what was decided since."""
        self._jobs += self.spill.take_reads()
        write = self.spill.take_write()
        if write is None:
            self.spill.take_prepared()
        else:
            self._jobs.append(write)

    def run(self, *, fails: bool = False) -> None:
        """Do the next job. One that fails writes nothing, or reads garbage."""
        if not self._jobs:
            return
        job = self._jobs.popleft()
        does = self._do_write if isinstance(job, SpillWrite) else self._do_read
        self._ran.append((job, does(job, fails=fails)))

    def _do_write(self, write: SpillWrite, *, fails: bool) -> list[object]:
        failed: list[object] = []
        for key, source, target in write.demotions:
            content = None if fails else self._read(key, source)
            if content is None:
                failed.append((key, target))
            else:
                self._write(key, target, content)
        for copy in write.copies:
            if fails:
                failed.append((copy.key, copy.place))
            else:
                self._write(copy.key, copy.place, self._cached(copy))
        return failed

    def _do_read(self, read: SpillRead, *, fails: bool) -> list[object]:
        failed: list[object] = []
        for number, copy in enumerate(read.copies):
            content = None if fails and number % 2 == 0 else self._read(copy.key, copy.place)
            if content is None:
                failed.append(copy)
            self._cache(copy, content)
        return failed

    def end(self) -> None:
        """Tell what came of the job that was done first."""
        if not self._ran:
            return
        job, failed = self._ran.popleft()
        if isinstance(job, SpillWrite):
            self.spill.write_ended(failed)
        else:
            self.model.scheduler.return_ended(job, failed, 1.0)
            self.num_returned += not failed

    def finish(self) -> None:
        """Do everything that is to be done."""
        self.take()
        while self.num_jobs:
            self.run()
            self.end()
            self.take()

    def _read(self, key: PartKey, place: SpillPlace) -> tuple[object, ...] | None:
        found = [self._bytes.get((place.level, place.offset + at)) for at in range(place.num_bytes)]
        first = found[0]
        if first is None or first[0] != key:
            return None
        whole = [(key, first[1], at) for at in range(place.num_bytes)]
        return first[1] if found == whole else None

    def _write(self, key: PartKey, place: SpillPlace, content: tuple[object, ...]) -> None:
        for at in range(place.num_bytes):
            self._bytes[place.level, place.offset + at] = (key, content, at)

    def _held(self, copy: PartCopy) -> tuple[dict[int, object], range]:
        if copy.key.kind is PartKind.STATE:
            return self.model.states, range(copy.number, copy.number + 1)
        is_window = copy.key.kind is PartKind.WINDOW
        held = self.model.window_slots if is_window else self.model.slots
        start = copy.number * self.model.block_tokens
        return held, range(start, start + self.model.block_tokens)

    def _cached(self, copy: PartCopy) -> tuple[object, ...]:
        held, slots = self._held(copy)
        return tuple(held.get(slot) for slot in slots)

    def _cache(self, copy: PartCopy, content: tuple[object, ...] | None) -> None:
        held, slots = self._held(copy)
        held.update(zip(slots, content or (GARBAGE,) * len(slots), strict=True))
