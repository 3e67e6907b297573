"""Decides when drafts are verified only to find out whether they pay by now: as often as a small share of the time allows. Pure.

Where drafts do not pay, nothing is learnt of them. A trial costs what its rows and its draft take, which is a fraction of a step
on one machine and several steps on another, so trials are rationed by their price and not by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHARE: Final = 0.015
"""Of the time of all steps, what trials may cost that were in vain."""
_MAX_STEPS: Final = 2.0
"""So many steps' time with one row is saved up for trials at most: what a token of a drafter costs that takes long."""
_FIRST_WAIT: Final = 16
_MAX_WAIT: Final = 1024
"""Steps of a request between a trial in vain and the next one, at first and at most; doubled each time."""


@dataclass(slots=True)
class Waiting:
    """How one request's trials stand. Its first one need not wait: nothing is known of it yet."""

    wait: int = 0
    waited: int = 0
    row_seconds: float = 0.0
    draft_seconds: float = 0.0
    """What its present trial takes: by the prices of rows, and of drafting as it was measured, or as expected before."""

    def left_out(self) -> None:
        """Note that a step was taken without its draft."""
        self.waited += 1

    def ended(self, *, was_right: bool) -> None:
        """Note what came of a trial: all of it right, so the next step may be one, too; or not."""
        self.waited = 0
        self.wait = 0 if was_right else min(max(2 * self.wait, _FIRST_WAIT), _MAX_WAIT)

    def paid_off(self) -> None:
        """Note that drafts pay: trials are over."""
        self.wait = _FIRST_WAIT
        self.waited = 0


class TrialBudget:
    """What trials may cost, of all requests."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"TrialBudget({1e3 * self._seconds:.1f} ms)"

    def earn(self, seconds: float, row_seconds: float) -> None:
        """Take a step of this length into account. row_seconds: of a step with one row."""
        self._seconds = min(self._seconds + _SHARE * seconds, _MAX_STEPS * row_seconds)

    def allows(self, waiting: Waiting, seconds: float) -> bool:
        """Whether a request's draft may be tried now, which is expected to cost this if it is wrong."""
        return waiting.waited >= waiting.wait and seconds <= self._seconds

    def spend(self, seconds: float) -> None:
        """Take what a trial cost."""
        self._seconds -= max(seconds, 0.0)
