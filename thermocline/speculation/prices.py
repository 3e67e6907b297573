"""What a decode step costs by its number of rows, as this machine's own steps tell. Pure: who measures says the times."""

from __future__ import annotations

from collections import Counter
from typing import Final

# A new measurement counts as much as this, and the first few as much as each other: the first step of all is slow.
_NEWEST: Final = 0.2
# Nothing counts more than so many times what was known: a page that had to be read is no price.
_MAX_RATIO: Final = 3.0
# What a row more is taken to cost until it was measured, as a share of a step with the least rows. Between a model whose
# rows read the same bytes and one whose rows read bytes of their own: too little finds out, too much never does.
_PRIOR_SLOPE: Final = 0.25


class StepPrices:
    """Seconds of a decode step by its rows, whoever's they are."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: Counter[int] = Counter()

    def __repr__(self) -> str:
        known = ", ".join(f"{n}: {1e3 * s:.1f} ms" for n, s in sorted(self._seconds.items()))
        return f"StepPrices({known})"

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a step of so many rows, with nothing beside it."""
        if seconds <= 0:  # a clock that stands still says nothing
            return
        known = self._seconds.get(num_rows, seconds)
        self._counts[num_rows] += 1
        weight = max(_NEWEST, 1 / self._counts[num_rows])
        self._seconds[num_rows] = known + weight * (min(seconds, known * _MAX_RATIO) - known)

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
            return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
        first, last = known[0], known[-1]
        slope = _PRIOR_SLOPE * self._seconds[first] / first
        if last > first:
            slope = max(0.0, (self._seconds[last] - self._seconds[first]) / (last - first))
        nearest = last if below else first
        return max(
            self._seconds[nearest] + slope * (num_rows - nearest), 0.1 * self._seconds[first]
        )
