"""What a decode step costs by its number of rows, as this machine's own steps tell. Pure: who measures says the times."""

from __future__ import annotations

from collections import deque
from typing import Final

_KEPT: Final = 8
"""Measurements of each number of rows. The highest does not count: a page that had to be read is no price."""
_FORGOTTEN_STEPS: Final = 256
_LONE_STEPS: Final = 32
"""After so many steps a price that was not measured again is forgotten; sooner where it was measured once. One that is too high
is not chosen, so nothing else would ever correct it.
"""
# What a row more is taken to cost until it was measured, as a share of a step with the least rows. Between a model whose
# rows read the same bytes and one whose rows read bytes of their own: too little finds out, too much never does.
_PRIOR_SLOPE: Final = 0.25


class StepPrices:
    """Seconds of a decode step by its rows, whoever's they are."""

    def __init__(self) -> None:
        self._values: dict[int, deque[float]] = {}
        self._measured: dict[int, int] = {}
        """By rows, the number of the step that was the last of them."""
        self._num_steps = 0
        self._seconds: dict[int, float] = {}

    def __repr__(self) -> str:
        known = ", ".join(f"{n}: {1e3 * s:.1f} ms" for n, s in sorted(self._seconds.items()))
        return f"StepPrices({known})"

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a step of so many rows, with nothing beside it."""
        if seconds <= 0:  # a clock that stands still says nothing
            return
        self._num_steps += 1
        self._measured[num_rows] = self._num_steps
        self._values.setdefault(num_rows, deque(maxlen=_KEPT)).append(seconds)
        self._forget()
        self._seconds = {n: _without_highest(values) for n, values in self._values.items()}

    def seconds(self, num_rows: int) -> float | None:
        """Return what a step of so many rows takes: measured, between two measured, or continued; None before any."""
        known = sorted(self._seconds)
        if not known:
            return None
        below = [n for n in known if n <= num_rows]
        above = [n for n in known if n >= num_rows]
        if below and above:
            low, high = below[-1], above[0]
            share = (num_rows - low) / (high - low) if high > low else 0.0
            between = self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
            # A step takes no longer than one of more rows: its own measurements were disturbed then.
            return min(between, *(self._seconds[n] for n in above))
        first, last = known[0], known[-1]
        slope = _PRIOR_SLOPE * self._seconds[first] / first
        if last > first:
            slope = max(0.0, self._slope_at_the_end(known))
        nearest = last if below else first
        return max(
            self._seconds[nearest] + slope * (num_rows - nearest), 0.1 * self._seconds[first]
        )

    def _slope_at_the_end(self, known: list[int]) -> float:
        """Return what a row more costs behind the last that was measured: as much as in the upper half of these, if that is less.

        The more rows, the less one more, where they share what is read; by the mean of all, longer drafts would never be tried.
        """
        last = known[-1]
        starts = [n for n in known[:-1] if n == known[0] or 2 * n <= last + 1]
        return min((self._seconds[last] - self._seconds[n]) / (last - n) for n in starts)

    def most_more_rows(self, num_rows: int) -> int:
        """Return up to how many rows more than these a price may be relied on: twice as many as were measured, at least one."""
        return max(1, 2 * (max(self._seconds, default=0) - num_rows))

    def _forget(self) -> None:
        for num_rows, step in list(self._measured.items()):
            kept = _LONE_STEPS if len(self._values[num_rows]) == 1 else _FORGOTTEN_STEPS
            if self._num_steps - step > kept:
                del self._measured[num_rows], self._values[num_rows]


def _without_highest(values: deque[float]) -> float:
    if len(values) == 1:
        return values[0]
    return (sum(values) - max(values)) / (len(values) - 1)
