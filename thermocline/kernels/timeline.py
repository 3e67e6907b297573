"""What each thread of the compute pool worked on, out of the core's own notes. Knows no recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from thermocline.kernels._native import Core

# Jobs of the pool between two calls of `take`: one layer has about a dozen.
_CAPACITY = 4096


@dataclass(frozen=True, slots=True)
class ThreadWork:
    """Times in which one thread computed, none of them waiting. starts_ns, ends_ns: int64 [n], monotonic.

    part: which part of the job it was, as the core marked it.
    """

    thread: int
    part: int
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]


class PoolTimeline:
    """Has the core note what its threads do in one job after another. For one thread at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._notes = np.empty((_CAPACITY, 3), np.int64)

    def busy_ns(self) -> list[int]:
        """Return how long each thread has worked so far. From any thread; never waits."""
        return self._core.busy_ns()

    def begin(self) -> None:
        """A job begins that is to be noted, with part 0."""
        self._core.start_timeline(_CAPACITY)

    def take(self) -> Iterator[ThreadWork]:
        """Yield what was noted of the job, by thread and part."""
        for thread in range(self._core.threads):
            notes = self._notes[: self._core.take_timeline(thread, self._notes)]
            if len(notes) == 0:
                continue
            changes = np.flatnonzero(np.diff(notes[:, 2])) + 1
            for part in np.split(notes, changes) if len(changes) else (notes,):
                yield ThreadWork(thread, int(part[0, 2]), part[:, 0], part[:, 1])
