"""Runs work that requests bring off their event loop, long work apart from short. Knows neither text nor requests.

Owns the threads. They are daemons, so that work without an end does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from thermocline.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

R = TypeVar("R")

BULK_CHARS: Final = 1 << 15
"""Work on more characters, or bytes, than this is long: it takes some tens of milliseconds or more."""
_SHORT: Final = frozenset({type(None), bool, int, float})
_NUM_QUICK: Final = 4
_MAX_BULK: Final = 4
# Between two looks for freed memory, after the last job: its result is sent, and freed, by others.
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0)
# `close` waits this long for a thread's present job.
_JOIN_S: Final = 1.0

StillWanted: TypeAlias = "Callable[[], None]"
"""Called by long work between its parts; raises when nobody waits for the result any more."""


class UnwantedError(Exception):
    """Nobody waits for the result of this work."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Generic[R]):
    work: Callable[[StillWanted], R]
    future: Future[R] = field(default_factory=Future)
    unwanted: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work(partial(_check, self.unwanted)))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self.future.set_exception(error)
        finally:
            # An error's traceback leads here. If this frame led back to the error by its future, what the request holds
            # would wait until cycles are collected. So the job is forgotten here, and by who calls this.
            del self


def _check(unwanted: threading.Event) -> None:
    if unwanted.is_set():
        raise UnwantedError


class Offload:
    """Two kinds of threads: some for short work, and one for every two processors for long work.

    However much long work there is, short work does not wait for it, and half of the processors stay free.
    """

    def __init__(self) -> None:
        num_bulk = max(1, min(_MAX_BULK, (os.cpu_count() or 1) // 2))
        self._quick = _Threads("thermocline quick", _NUM_QUICK)
        self._bulk = _Threads("thermocline bulk", num_bulk, after_each=_memory_returner())

    async def run(self, work: Callable[[StillWanted], R], *, is_bulk: bool) -> R:
        """Return `work(still_wanted)`, computed by a thread.

        When the caller is cancelled, work that waits is dropped, and work that runs ends at its next `still_wanted()`.
        Raises what the work raises, and EngineClosedError after `close`.
        """
        job = _Job(work)
        (self._bulk if is_bulk else self._quick).submit(job)
        try:
            return await asyncio.wrap_future(job.future)
        except (asyncio.CancelledError, UnwantedError):
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise EngineClosedError("the engine was closed: open a new one") from None
            raise
        finally:
            job.unwanted.set()
            del job  # as in `_Job.run`

    async def run_if_long(self, work: Callable[[], R], *about: object) -> R:
        """Return `work()`: computed here, or by a thread if the JSON values that it is about are long (`is_bulk`).

        Raises as `run` does. It is for work that takes some ten nanoseconds per character, and does not end early.
        """
        return await self.run(lambda _: work(), is_bulk=True) if is_bulk(*about) else work()

    def return_memory(self) -> None:
        """Give the system back what is free now and in the next seconds: for whoever held much that no job freed."""
        if not self._bulk.has_waiting:  # else it is done after what waits
            with suppress(EngineClosedError):
                self._bulk.submit(_Job(lambda _: None))

    def close(self) -> None:
        """Take no more work. Work that waits fails, work that runs ends at its next `still_wanted()`."""
        for threads in (self._quick, self._bulk):
            threads.close()


def is_bulk(*values: object) -> bool:
    """Whether the values have more than BULK_CHARS characters, list entries counted as eight.

    They are JSON values, also in a body's typed form: an object whose class lists its fields in `__struct_fields__`.
    """
    left = BULK_CHARS
    level = list(values)
    while level and left >= 0:
        value = level.pop()
        if isinstance(value, str):
            left -= len(value)
            continue
        if isinstance(value, dict):
            entries: Collection[object] = value.values()
        elif isinstance(value, list | tuple):
            entries = value
        else:
            entries = _getter(getattr(value, "__struct_fields__", ()))(value)
        left -= 8 * len(entries)
        if left >= 0:
            # Thousands of entries are looked through on the event loop: most have no length of their own.
            level += [entry for entry in entries if entry.__class__ not in _SHORT]
    return left < 0


@cache
def _getter(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    """Return the function that gives an object's values of these names."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


class _Threads:
    """So many threads, started when they are first needed.

    after_each: called after each job, and again some times while no other comes, because results are freed later.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        after_each: Callable[[], None] | None = None,
        pauses_s: tuple[float, ...] = _PAUSES_S,
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._after_each = after_each
        self._pauses_s = pauses_s
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._open: set[_Job[Any]] | None = set()

    @property
    def has_waiting(self) -> bool:
        """Whether a job has not begun."""
        return not self._jobs.empty()

    def submit(self, job: _Job[Any]) -> None:
        """Queue the job. Raises EngineClosedError after `close`."""
        with self._lock:
            if self._open is None:
                raise EngineClosedError("the engine is closed: open a new one")
            self._open.add(job)
            if len(self._started) < self._num_threads:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._started.append(thread)
        self._jobs.put(job)

    def close(self) -> None:
        """Drop the jobs that wait, and tell the others that they are not wanted."""
        with self._lock:
            jobs, self._open = self._open or set(), None
        for job in jobs:
            job.unwanted.set()
            job.future.cancel()
        for _ in self._started:
            self._jobs.put(None)
        for thread in self._started:
            thread.join(_JOIN_S)

    def _work(self) -> None:
        pauses: Iterator[float] = iter(())
        while True:
            try:
                job = self._jobs.get(timeout=next(pauses, None))
            except Empty:
                pass
            else:
                if job is None:
                    return
                job.run()
                with self._lock:
                    if self._open is not None:
                        self._open.discard(job)
                del job  # and with it the result
                pauses = iter(self._pauses_s if self._after_each else ())
            if self._after_each is not None:
                self._after_each()


def _memory_returner() -> Callable[[], None] | None:
    """Return what gives freed memory back to the system; None where the C library has no such call.

    glibc keeps what other threads than the first freed: 0.9 GB after a few long texts.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return lambda: trim(0)
