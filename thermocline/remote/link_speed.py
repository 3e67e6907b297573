"""How fast a worker's link is, from the calls that went over it. Pure.

What a call takes beyond the worker's own compute is its way there and back. Short calls are left out, which tell the
latency instead. Knows no connection.
"""

from __future__ import annotations

from typing import Final

# Below it, latency is most of the way.
_LEAST_BYTES: Final = 32 << 10
# What was known counts so much less with each call.
_KEPT: Final = 0.9


class LinkSpeed:
    """One thread at a time may add; any thread may ask."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Take in a call that had the link to itself: its bytes in both directions, and how long they took."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            self._nbytes = self._nbytes * _KEPT + nbytes
            self._seconds = self._seconds * _KEPT + seconds

    @property
    def bytes_per_s(self) -> float:
        """Of late, both directions together and latency included; 0 while nothing is known."""
        return self._nbytes / self._seconds if self._seconds else 0.0
