"""Copies parts of the cache to its second tier and back, on a thread of its own, as the scheduler decides.

Between the scheduler and the store of bytes. Owns the clock of both. Jobs are done in the order in which they were decided,
which is what keeps each place's bytes right (see kv.spill_index). Knows no tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from thermocline.traces.busy import BusyTime
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from thermocline.kv.spill_index import Demotion, PartCopy, PartKey, SpillPlace
    from thermocline.messages import Chunk, ChunkId
    from thermocline.pipeline.scheduling.request_spill import (
        RequestSpill,
        SpillRead,
        SpillStatistics,
        SpillWrite,
    )
    from thermocline.pipeline.scheduling.scheduler import Scheduler
    from thermocline.traces.recorder import Recorder

_LOG: Final = logging.getLogger("thermocline.kv")


class PartStore(Protocol):
    """What moves the bytes: see `SpillStore`. Each call may raise OSError."""

    def save(self, copy: PartCopy) -> None:
        """Copy a part from the cache to the tier."""
        ...

    def load(self, copy: PartCopy) -> bool:
        """Copy a part from the tier to the cache; False if it is not what was saved."""
        ...

    def demote(self, demotion: Demotion) -> None:
        """Copy a part to the next level of the tier."""
        ...


_Failed = list[tuple["PartKey", "SpillPlace"]]


class Spilling:
    """Carries out what the scheduler wants copied. Close it, or leave its context, to end its thread."""

    def __init__(
        self,
        spill: RequestSpill,
        scheduler: Scheduler,
        store: PartStore,
        recorder: Recorder,
        levels: tuple[str, ...],
    ) -> None:
        """levels: what the tier's levels are called in statistics."""
        self._spill = spill
        self._scheduler = scheduler
        self._store = store
        self._recorder = recorder
        self._levels = levels
        self._thread = ThreadPoolExecutor(1, "cache spill")
        self._closed = False
        self._written_end = [0] * len(levels)
        """Of each level, the end of the bytes that could be written."""
        self._has_warned = False
        self._started_ns: dict[ChunkId, int] = {}
        self._ended_ns = 0
        self._busy = BusyTime()

    def __repr__(self) -> str:
        return f"Spilling({self._spill})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread after what it does now. Blocks; more calls do nothing."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being copied."""
        return self._spill.is_idle

    def statistics(self) -> SpillStatistics:
        """Return what the tier holds, and what came of it. May be called from any thread."""
        return self._spill.statistics(self._levels)

    def busy_ns(self) -> int:
        """Return how long the thread has worked. May be called from any thread; never waits."""
        return self._busy.total_ns(time.perf_counter_ns())

    def chunk_started(self, chunk: Chunk) -> None:
        """Note when a prompt's chunk began."""
        if chunk.is_prompt:
            self._started_ns[chunk.id] = time.perf_counter_ns()

    def chunk_ended(self, chunk: Chunk) -> None:
        """Note how long a prompt's chunk took, from its start or from the end of the one before."""
        started_ns = self._started_ns.pop(chunk.id, None)
        if started_ns is not None:
            now_ns = time.perf_counter_ns()
            seconds = (now_ns - max(started_ns, self._ended_ns)) * 1e-9
            self._spill.costs.observe_prompt(chunk.num_tokens, seconds)
            self._ended_ns = now_ns

    def start(self, resume: Callable[[], None]) -> None:
        """Start what the scheduler has decided. Never waits. resume: called on this thread when requests may go on."""
        if self._closed:
            return
        loop = None
        for read in self._spill.take_reads():
            loop = loop or asyncio.get_running_loop()
            job = loop.run_in_executor(self._thread, self._read, read)
            job.add_done_callback(partial(self._read_ended, read, resume))
        write = self._spill.take_write()
        if write is not None:
            loop = loop or asyncio.get_running_loop()
            written = loop.run_in_executor(self._thread, self._write, write)
            written.add_done_callback(partial(self._write_ended, write, resume))
        elif self._spill.take_prepared():
            loop = loop or asyncio.get_running_loop()
            loop.call_soon(resume)

    def _read(self, read: SpillRead) -> tuple[list[PartCopy], float]:
        """Return which parts are damaged, and the seconds that it took."""
        start_ns, shown_ns = time.perf_counter_ns(), self._recorder.now_ns()
        self._busy.begin(start_ns)
        damaged = []
        for copy in read.copies:
            try:
                is_whole = self._store.load(copy)
            except OSError as error:
                _LOG.debug("a part of the spilt cache can not be read: %s", error)
                is_whole = False
            if not is_whole:
                damaged.append(copy)
        self._show(Name.LOAD, shown_ns, sum(copy.place.num_bytes for copy in read.copies))
        return damaged, (time.perf_counter_ns() - start_ns) * 1e-9

    def _read_ended(
        self,
        read: SpillRead,
        resume: Callable[[], None],
        job: asyncio.Future[tuple[list[PartCopy], float]],
    ) -> None:
        if self._closed or job.cancelled():
            return
        error = job.exception()
        if error is not None:
            _LOG.error("reading the spilt cache failed", exc_info=error)
        damaged, seconds = (list(read.copies), 0.0) if error is not None else job.result()
        if damaged:
            _LOG.warning(
                "%d of %d parts of a prompt that were spilt are not what was written: the prompt is computed again; "
                "check the disk of --cache-spill-dir",
                len(damaged),
                len(read.copies),
            )
        self._scheduler.return_ended(read, damaged, seconds)
        resume()

    def _write(self, write: SpillWrite) -> tuple[_Failed, OSError | None]:
        """Return what could not be written, and the last reason."""
        shown_ns = self._recorder.now_ns()
        self._busy.begin(time.perf_counter_ns())
        failed: _Failed = []
        reason = None
        jobs = [
            *((each.key, each.target, partial(self._store.demote, each)) for each in write.demotions),
            *((each.key, each.place, partial(self._store.save, each)) for each in write.copies),
        ]  # fmt: skip
        for key, place, job in jobs:
            try:
                job()
            except OSError as error:
                failed.append((key, place))
                reason = error
            else:
                end = place.offset + place.num_bytes
                self._written_end[place.level] = max(self._written_end[place.level], end)
        self._show(Name.COPY, shown_ns, sum(place.num_bytes for _, place, _ in jobs))
        return failed, reason

    def _write_ended(
        self,
        write: SpillWrite,
        resume: Callable[[], None],
        job: asyncio.Future[tuple[_Failed, OSError | None]],
    ) -> None:
        if self._closed or job.cancelled():
            return
        error = job.exception()
        if error is not None:
            _LOG.error("spilling the cache failed", exc_info=error)
            everything = [(each.key, each.target) for each in write.demotions]
            self._spill.write_ended([*everything, *((c.key, c.place) for c in write.copies)])
            return
        failed, reason = job.result()
        self._spill.write_ended(failed)
        for level in {place.level for _, place in failed}:
            self._spill.limit(level, self._written_end[level])
        if failed and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the prompt cache can not be spilt further (%s): what does not fit is computed again; make room on the "
                "disk of --cache-spill-dir, or lower --cache-spill-disk",
                reason,
            )
        self.start(resume)

    def _show(self, name: Name, start_ns: int, num_bytes: int) -> None:
        self._busy.end(time.perf_counter_ns())
        end_ns = self._recorder.now_ns()
        self._recorder.span(Lane.SPILL, name, start_ns, end_ns, {"bytes": num_bytes})
