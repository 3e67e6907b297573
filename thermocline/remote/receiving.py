"""Decides how a thread that waits for a worker's answer gets it, by what each way took of late. Pure.

Which way is best depends on who else wants the processors: on an idle machine to look without sleeping takes a fifth of
being woken by the client's thread; on a busy one it keeps the worker itself from running. Knows no connection.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

# How often another way than the best is tried. Ways are compared by the median of their newest waits: a thread that
# others kept from running waits a hundred times as long.
_TRIES_EVERY: Final = 32
_NUM_NEWEST: Final = 9


class Way(Enum):
    """How an answer is waited for."""

    SPIN = "spin"
    """Look at the socket without sleeping at first."""
    SLEEP = "sleep"
    """Sleep until something comes."""
    LEAVE = "leave"
    """Leave it to the client's thread, and be woken by that."""


class WayChoice:
    """One thread at a time may use it."""

    def __init__(self) -> None:
        self._newest = {way: deque[float](maxlen=_NUM_NEWEST) for way in Way}
        self._usual: dict[Way, float] = {}
        self._num_chosen = 0

    def choose(self) -> Way:
        """Return the way for the next wait: each once, then the best, and now and then another one."""
        for way in Way:
            if way not in self._usual:
                return way
        self._num_chosen += 1
        turn, rest = divmod(self._num_chosen, _TRIES_EVERY)
        best, *others = sorted(Way, key=self._usual.__getitem__)
        return best if rest else others[turn % len(others)]

    def add(self, way: Way, seconds: float) -> None:
        """Take in how long an answer took until the waiting thread went on, without the worker's compute."""
        newest = self._newest[way]
        newest.append(seconds)
        self._usual[way] = sorted(newest)[len(newest) // 2]
