"""How many prompt tokens a chunk may have while answers are decoded beside it. Pure: told all times.

A decode step waits at most for the prompt jobs that run when its own jobs arrive, so the chunk is made
as large as those waits allow. Knows neither requests nor lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMALLEST_TOKENS = 32

# Weight of the newest measurement in a moving average.
_NEWEST = 0.1

# A larger chunk must fit into this share of the limit, the present one into all of it: noise of some
# per cent does not move the size to and fro.
_SPARE = 0.75


@dataclass(slots=True)
class _Average:
    """A moving average; the first values count equally, so that it starts near the truth."""

    value: float = 0.0
    num_values: int = 0

    def add(self, value: float) -> None:
        self.num_values += 1
        self.value += (value - self.value) * max(_NEWEST, 1 / self.num_values)


class _Line:
    """Seconds over tokens: a least-squares line with old points forgotten, never falling."""

    def __init__(self) -> None:
        self._x, self._y, self._xx, self._xy = _Average(), _Average(), _Average(), _Average()

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measurement."""
        self._x.add(tokens)
        self._y.add(seconds)
        self._xx.add(tokens * tokens)
        self._xy.add(tokens * seconds)

    def at(self, tokens: int) -> float | None:
        """Return the seconds of so many tokens; None before the first measurement."""
        if not self._x.num_values:
            return None
        x, y = self._x.value, self._y.value
        variance = self._xx.value - x * x
        slope = (self._xy.value - x * y) / variance if variance > 1e-3 * x * x else None
        if slope is None:
            # One size says nothing of others: they take no less, and in proportion if larger.
            return y * max(1.0, tokens / x)
        slope = min(max(slope, 0.0), y / x)
        return y + slope * (tokens - x)


class ChunkSizer:
    """Chooses among 32, 64, 128, ... tokens, and the most that are allowed."""

    def __init__(self, max_tokens: int, slowdown: float, waits_per_step: float) -> None:
        """slowdown: time per token beside prompts over time per token alone, at most. waits_per_step:
        for how many prompt jobs one decode step may wait, as far as is known before measuring.
        """
        self._slowdown = slowdown
        sizes = {max_tokens}
        size = _SMALLEST_TOKENS
        while size < max_tokens:
            sizes.add(size)
            size *= 2
        self._sizes = sorted(sizes)
        self._present = self._sizes[0]
        self._job_s = _Line()
        self._idle_s: dict[int, _Average] = {}
        self._fastest_s: float | None = None
        self._waits = _Average(waits_per_step, 1)

    def __repr__(self) -> str:
        return f"ChunkSizer({self._present} of {self._sizes[-1]} tokens)"

    def observe_prompt(self, num_tokens: int, job_s: float) -> None:
        """Learn the longest job of a prompt chunk for which a decode step may have to wait."""
        self._job_s.add(num_tokens, job_s)

    def observe_decode(self, num_tokens: int, step_s: float, *, beside_tokens: int) -> None:
        """Learn how long a step of `num_tokens` answers took beside prompt chunks of so many tokens.

        beside_tokens 0: no prompt was in flight.
        """
        if not beside_tokens:
            self._idle_s.setdefault(num_tokens, _Average()).add(step_s)
            return
        self._fastest_s = step_s if self._fastest_s is None else min(step_s, self._fastest_s)
        job_s, idle = self._job_s.at(beside_tokens), self._idle_s.get(num_tokens)
        if job_s and idle is not None:
            self._waits.add(max(step_s - idle.value, 0.0) / job_s)

    def chunk_tokens(self, num_decoding: int) -> int:
        """Return the most tokens of the next prompt chunk, beside steps of so many answers."""
        if not num_decoding:
            return self._sizes[-1]
        allowed_s = (self._slowdown - 1.0) * self._idle(num_decoding)
        if self._wait(self._present) > allowed_s:
            self._present = self._largest(allowed_s)
        else:
            self._present = max(self._present, self._largest(allowed_s * _SPARE))
        return self._present

    def _largest(self, allowed_s: float) -> int:
        fitting = [size for size in self._sizes if self._wait(size) <= allowed_s]
        return fitting[-1] if fitting else self._sizes[0]

    def _wait(self, tokens: int) -> float:
        """Seconds that a step waits beside chunks of so many tokens; without end if nobody knows."""
        job_s = self._job_s.at(tokens)
        return float("inf") if job_s is None else self._waits.value * job_s

    def _idle(self, num_tokens: int) -> float:
        """Seconds of a step alone, or of the most similar one that was measured."""
        if not self._idle_s:
            # Beside the smallest chunks, with which unknown machines begin, a step is hardly slower.
            return self._fastest_s or 0.0
        nearest = min(self._idle_s, key=lambda known: abs(known - num_tokens))
        return self._idle_s[nearest].value
