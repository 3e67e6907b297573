"""Owns where trace times come from: the host clock, a fake one, and device events mapped to host time.

All times are integer nanoseconds of one monotonic clock with an arbitrary zero. Knows no recorder
and no device API: device times come in as numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock; may be called from any thread."""

    def now_ns(self) -> int:
        """Return the nanoseconds since the clock's zero; never less than an earlier answer."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Return the nanoseconds of `time.perf_counter_ns`."""
        return time.perf_counter_ns()


class FakeClock:
    """A clock that moves only when told to."""

    __slots__ = ("_now_ns",)

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def __repr__(self) -> str:
        return f"FakeClock(now_ns={self._now_ns})"

    def now_ns(self) -> int:
        """Return the time that `advance` has brought us to."""
        return self._now_ns

    def advance(self, duration_ns: int) -> None:
        """Move the clock forward; raises ValueError for a step back."""
        if duration_ns < 0:
            raise ValueError(f"a monotonic clock can not go back by {-duration_ns} ns")
        self._now_ns += duration_ns


@dataclass(frozen=True, slots=True)
class DeviceAnchor:
    """One moment known on both clocks: device event zero happened at `host_ns`, give or take `error_ns`."""

    host_ns: int
    error_ns: int

    @classmethod
    def between(cls, before_ns: int, after_ns: int) -> DeviceAnchor:
        """Return the anchor of an event that was recorded and waited for between two host readings."""
        if after_ns < before_ns:
            raise ValueError(f"the anchor's end {after_ns} lies before its start {before_ns}")
        half_ns = (after_ns - before_ns) // 2
        return cls(host_ns=before_ns + half_ns, error_ns=after_ns - before_ns - half_ns)

    def to_host_ns(self, elapsed_ms: float) -> int:
        """Return the host time of an event that the device saw `elapsed_ms` after the anchor event."""
        return self.host_ns + round(elapsed_ms * 1e6)
