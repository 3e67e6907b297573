"""How long a worker's answer is waited for before it is computed here as well: a multiple of what is usual. Pure.

Keeps running means of answer times of one worker, by kind of chunk and size of the request. Knows no clock.
"""

from __future__ import annotations

from typing import Final

# Answers vary by the load of both machines and by experts that come from a disk.
_MULTIPLE: Final = 4.0
# Below it, what is late is mostly a thread that another one kept from running.
_LEAST_S: Final = 0.03
# While no answer is known.
_FIRST_S: Final = 1.0
_NEWEST_WEIGHT: Final = 0.1
# A late answer counts as at most so many times its patience: a worker that became slower is soon given more time, and
# one that was stopped for a minute is not waited for a minute.
_MOST_LATE: Final = 2.0


class AnswerTimes:
    """One thread at a time may add; any thread may ask."""

    def __init__(self) -> None:
        self._means: dict[tuple[bool, int], float] = {}

    def add(self, is_prompt: bool, num_pairs: int, seconds: float) -> None:
        """Take in how long an answer took: since its request, or since the answer before it."""
        seconds = min(seconds, _MOST_LATE * self.patience_s(is_prompt, num_pairs))
        key = is_prompt, num_pairs.bit_length()
        mean = self._means.get(key)
        self._means[key] = seconds if mean is None else mean + (seconds - mean) * _NEWEST_WEIGHT

    def patience_s(self, is_prompt: bool, num_pairs: int) -> float:
        """Return after how many seconds without an answer the worker is late.

        Where no request of this size was answered, the nearest size tells; a smaller one by the ratio of pairs.
        """
        size = num_pairs.bit_length()
        known = [
            (abs(size - other), other) for kind, other in tuple(self._means) if kind is is_prompt
        ]
        if not known:
            return _FIRST_S
        _, nearest = min(known)
        usual_s = self._means[is_prompt, nearest] * 2.0 ** max(size - nearest, 0)
        return max(_MULTIPLE * usual_s, _LEAST_S)
