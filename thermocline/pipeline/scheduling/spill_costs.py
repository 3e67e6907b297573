"""Decides whether reading spilt parts back is faster than computing them again, by what both took so far. Pure.

The caller measures. Knows neither parts nor requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# What a later measurement leaves of an earlier one's weight.
_KEPT: Final = 0.7
# What a refusal leaves of the expected cost, so that a slow moment of the disk does not decide for ever.
_FORGIVEN: Final = 0.9


class _Rate:
    """Seconds for each of a number of things, of late; large measurements count for more."""

    def __init__(self) -> None:
        self._seconds = self._count = 0.0

    @property
    def is_known(self) -> bool:
        return self._count > 0

    @property
    def value(self) -> float:
        return self._seconds / self._count if self._count else 0.0

    def add(self, count: float, seconds: float) -> None:
        self._count = self._count * _KEPT + count
        self._seconds = self._seconds * _KEPT + seconds

    def scale(self, factor: float) -> None:
        self._seconds *= factor


class SpillCosts:
    """Seconds per byte of each level, and per token of a prompt."""

    def __init__(self, num_levels: int) -> None:
        self._bytes = [_Rate() for _ in range(num_levels)]
        self._tokens = _Rate()

    def __repr__(self) -> str:
        rates = [each.value for each in self._bytes]
        return f"SpillCosts({rates} s/byte, {self._tokens.value} s/token)"

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        """Note how long prompt tokens took to compute."""
        self._tokens.add(num_tokens, seconds)

    def observe_read(self, bytes_by_level: Sequence[int], seconds: float) -> None:
        """Note how long it took to read so many bytes of each level; a byte of each is taken to need the same time."""
        num_bytes = sum(bytes_by_level)
        for count, rate in zip(bytes_by_level, self._bytes, strict=True):
            if count:
                rate.add(count, seconds * count / num_bytes)

    def pays(self, num_tokens: int, bytes_by_level: Sequence[int]) -> bool:
        """Whether reading the bytes is expected to be faster than computing the tokens; what was never measured is tried."""
        reads = zip(bytes_by_level, self._bytes, strict=True)
        read_s = sum(count * rate.value for count, rate in reads)
        if not self._tokens.is_known or read_s < num_tokens * self._tokens.value:
            return True
        for rate in self._bytes:
            rate.scale(_FORGIVEN)
        return False
