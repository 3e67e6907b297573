"""Decides whether steps go through the device or are left to the CPU whole: whichever was faster lately. Pure.

What a layer in parts costs besides its parts (threads that take turns, hops between lanes) no trial of parts can
tell, so both ways are taken and timed. Chunks of about the same size race against each other. Knows no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Steps of each way before the first decision.
_FIRST_TRIES: Final = 3
# The slower way is tried again after so many steps, then after twice as many, and so on up to the most.
_REST: Final = 128
_MOST_REST: Final = 4096
_TRIES: Final = 2
_NEWEST: Final = 0.3


@dataclass(slots=True)
class _Way:
    """seconds: a running mean; the next one replaces it where `is_old`, and the first two do, of which the first
    compiles, or brings pages into view.
    """

    seconds: float = 0.0
    count: int = 0
    is_old: bool = False

    def add(self, seconds: float) -> None:
        replaces = self.is_old or self.count <= 1
        self.seconds += (seconds - self.seconds) * (1.0 if replaces else _NEWEST)
        self.count += 1
        self.is_old = False


@dataclass(slots=True)
class _Race:
    """Between chunks of one size class. due: tries that are left of the way that is being tried."""

    device: _Way = field(default_factory=_Way)
    cpu: _Way = field(default_factory=_Way)
    uses_device: bool = True
    num_since: int = 0
    rest: int = _REST
    due: int = 0

    def faster_is_device(self) -> bool:
        return self.device.seconds <= self.cpu.seconds


class StepRace:
    """Keeps times by size class: 1 token, 2 to 3, 4 to 7, ..."""

    def __init__(self) -> None:
        self._races: dict[int, _Race] = {}

    def uses_device(self, num_tokens: int) -> bool:
        """Return whether the next chunk of so many tokens goes through the device."""
        race = self._races.get(num_tokens.bit_length())
        return race is None or race.uses_device

    def observe(self, num_tokens: int, seconds: float, *, on_device: bool) -> None:
        """Take in how long a chunk held up those behind it."""
        race = self._races.setdefault(num_tokens.bit_length(), _Race())
        way = race.device if on_device else race.cpu
        way.add(seconds / num_tokens)
        if race.device.count < _FIRST_TRIES or race.cpu.count < _FIRST_TRIES:
            race.uses_device = race.device.count < _FIRST_TRIES
            return
        if on_device is not race.uses_device:
            return  # it was on its way before the last decision
        faster = race.faster_is_device()
        if race.due:
            race.due -= 1
            if race.due:
                return
            # The other way was tried: it goes on, or rests for longer.
            race.rest = _REST if faster is race.uses_device else min(2 * race.rest, _MOST_REST)
            race.uses_device, race.num_since = faster, 0
            return
        race.num_since += 1
        if race.num_since >= race.rest or faster is not race.uses_device:
            race.uses_device, race.due, race.num_since = not race.uses_device, _TRIES, 0
            (race.device if race.uses_device else race.cpu).is_old = True
