"""A call that is being read: what of it was handed on, and how it ends if it can not go on.

Owns the ends of calls: one that is broken before it was handed on is no call; later it is closed. Knows no
format and no pattern.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from thermocline.text.pieces import TextPiece, ToolCallArguments, ToolCallBegin
from thermocline.text.tool_calls.feed import SPACE, begins_with, skip_space, takes
from thermocline.text.tool_calls.literals import JSON, Outcome, literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.text.pieces import Piece
    from thermocline.text.tool_calls.feed import Feed, Put, Reading
    from thermocline.text.tool_calls.literals import Dialect


class NoCallError(Exception):
    """What looked like a call is none, and nothing of it was handed on."""


class CallEndedError(Exception):
    """The call has begun, and ends here: the text is cut, or broken and closed."""


class HeldSpace:
    """Space at the end of a text that comes in pieces. Looks at each character once, however long the space is."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Return what was held and `text`, but for the space at its end, which is held from now on."""
        shown = text.rstrip(SPACE)
        if not shown:
            self._pieces.append(text)
            return ""
        whole = self.take() + shown
        self._pieces.append(text[len(shown) :])
        return whole

    def take(self) -> str:
        """Return what was held; nothing is held any more."""
        held = "".join(self._pieces)
        self._pieces.clear()
        return held


class TextOutlet:
    """Text on its way out. Space is held until text follows it; next to calls and envelopes it is dropped."""

    def __init__(self, say: Callable[[Piece], None]) -> None:
        self._say = say
        self._held = HeldSpace()
        self._drops_space = False

    def push(self, text: str) -> None:
        """Hand on `text` but for the space at its end."""
        shown = self._held.push(text)
        if self._drops_space:
            shown = shown.lstrip(SPACE)
        if shown:
            self._drops_space = False
            self._say(TextPiece(shown))

    def drop_space(self) -> None:
        """Drop the space on both sides of this place: a call stands here, or the end of an envelope."""
        self._held.take()
        self._drops_space = True

    def flush(self) -> None:
        """Hand on the space at the end, unless it is dropped."""
        space = self._held.take()
        if space and not self._drops_space:
            self._say(TextPiece(space))


class OpenCall:
    """One call of an answer after the other. feed: the answer's text."""

    def __init__(self, feed: Feed, say: Callable[[Piece], None], outlet: TextOutlet) -> None:
        self.feed = feed
        self.has_begun = False
        """Whether the present call was handed on, so that it can not be taken back."""
        self._say, self._outlet = say, outlet
        self._index = -1

    def begin(self, name: str) -> None:
        """Hand on that a call begins."""
        self._index += 1
        self.has_begun = True
        self._outlet.drop_space()
        self._say(ToolCallBegin(self._index, name))

    def put(self, text: str) -> None:
        """Hand on more of its arguments."""
        if text:
            self._say(ToolCallArguments(self._index, text))

    def stop(self) -> Exception:
        """Return what ends reading here."""
        return CallEndedError() if self.has_begun else NoCallError()

    def close(self, closing: str) -> Exception:
        """Hand on `closing`, unless the text is only cut; return what ends reading here."""
        if self.has_begun and (self.feed.text or not self.feed.has_ended):
            self.put(closing)
        return self.stop()

    def expect(self, word: str, closing: str = "") -> Reading[None]:
        """Take `word`, with or without space before it; another word ends the call."""
        yield from skip_space(self.feed)
        if not (yield from takes(self.feed, word)):
            raise self.close(closing)

    def pass_over(self, word: str) -> Reading[None]:
        """Take `word` if it comes."""
        yield from skip_space(self.feed)
        yield from takes(self.feed, word)

    def value(self, dialect: Dialect, put: Put, closing: str = "") -> Reading[None]:
        """Hand on a literal to `put`; `closing` closes what is around it, if it is broken."""
        outcome = yield from literal(self.feed, dialect, put)
        if outcome is Outcome.BROKEN and closing:
            put(closing)
        if outcome is not Outcome.DONE:
            raise self.stop()

    def text(self) -> Reading[str]:
        """Read a JSON string; return what it says."""
        yield from skip_space(self.feed)
        if not (yield from begins_with(self.feed, '"')):
            raise self.stop()
        parts: list[str] = []
        yield from self.value(JSON, parts.append)
        return str(json.loads("".join(parts)))
