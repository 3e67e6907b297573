"""Stop strings over a text stream: sans-I/O matcher that holds back what may become a match.

Owns the text that was pushed and not yet handed on. It knows no tokens and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STOPS = 16
MAX_STOP_BYTES = 256


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may be sent now; `matched` is the stop string that ended the stream, or None."""

    text: str
    matched: str | None


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return `stops` without repeats. Raises RequestError (param "stop") outside the limits."""
    if isinstance(stops, str):
        raise RequestError("stop must be a list of strings: wrap the one string", param="stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"{len(stops)} stop strings: give at most {MAX_STOPS}",
            param="stop",
        )
    for stop in stops:
        if not stop:
            raise RequestError("a stop string is empty: leave it out", param="stop")
        if len(stop.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise RequestError(
                f"a stop string is longer than {MAX_STOP_BYTES} bytes: shorten it", param="stop"
            )
    return tuple(dict.fromkeys(stops))


class StopMatcher:
    """Passes text through until one of `stops` is complete.

    The stop string that is complete first wins; of several that end at the same character, the
    longest. So the result depends on the text alone, never on how it was split. The text that comes
    out ends before the match. Characters are held back only while they are the beginning of some stop
    string. After a match every further push gives no text and the same match.

    Raises RequestError for an empty, too long or too frequent stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = check_stops(stops)
        self._starts = frozenset(stop[:end] for stop in self._stops for end in range(1, len(stop)))
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def __repr__(self) -> str:
        return f"StopMatcher(stops={self._stops!r}, held={self._held!r}, matched={self._matched!r})"

    @property
    def matched(self) -> str | None:
        """The stop string that was found, None so far."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Take more text; return what may be sent now and the match, if it is complete."""
        if self._matched is not None:
            return StopResult("", self._matched)
        text = self._held + text
        found = self._first_complete(text)
        if found is not None:
            start, self._matched = found
            self._held = ""
            return StopResult(text[:start], self._matched)
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> StopResult:
        """The stream is over: return the text that was still held back."""
        text, self._held = self._held, ""
        return StopResult(text, self._matched)

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """Start and text of the stop string with the smallest end, the longest of those."""
        ends = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end - len(stop), stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            if text[-length:] in self._starts:
                return length
        return 0
