"""What parsers of tool calls share: the protocol, text that waits for what follows it, and calls as JSON.

Sans-I/O. Knows no markers and no request.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from thermocline.text.pieces import Piece, TextPiece, ToolCallArguments, ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

_SPACE: Final = " \t\r\n"
_ARGUMENT_KEYS: Final = frozenset(("arguments", "parameters"))
_OTHER_KEYS: Final = frozenset(("id", "type"))


class CallParser(Protocol):
    """Tells an answer's tool calls from its text, however it is cut. One per answer."""

    def push(self, text: str) -> Iterator[Piece]:
        """Yield what became certain."""
        ...

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back; the answer has ended."""
        ...


class TextOutlet:
    """Text on its way out. Space is held until text follows it; next to calls it is dropped."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yield `text` but for the space at its end."""
        whole = self._space + text
        shown = whole.rstrip(_SPACE)
        self._space = whole[len(shown) :]
        if self._after_call:
            shown = shown.lstrip(_SPACE)
        if shown:
            self._after_call = False
            yield TextPiece(shown)

    def call(self) -> None:
        """A call stands here."""
        self._space = ""
        self._after_call = True

    def flush(self) -> Iterator[Piece]:
        """Yield the space at the end, unless a call was before it."""
        if self._space and not self._after_call:
            yield TextPiece(self._space)
        self._space = ""


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of `markers`."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


class _Expect(Enum):
    """What `JsonCall` waits for."""

    OPEN = auto()
    KEY_OR_CLOSE = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA_OR_CLOSE = auto()


class CallState(Enum):
    """How far a call was read. BROKEN: it is none."""

    READING = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """Reads {"name": ..., "arguments": {...}}, one character after the other.

    Arguments are handed on as they come, once the name is known; what is before the name waits for
    it. "parameters" is taken for "arguments", and an object that is written as a string for itself.
    """

    def __init__(self, index: int) -> None:
        self.state = CallState.READING
        self.has_begun = False
        """Whether the name was handed on, so that it can not be taken back."""
        self._index = index
        self._expect = _Expect.OPEN
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._name: str | None = None
        self._waiting: list[str] = []
        self._has_arguments = False

    def push(self, text: str) -> tuple[int, list[Piece]]:
        """Take from the start of `text` what belongs to the call; return how many characters, and pieces."""
        used = 0
        while used < len(text) and self.state is CallState.READING:
            used += self._step(text[used])
        return used, list(self._collected())

    def _step(self, char: str) -> int:
        """Take one character; return 1, or 0 if it has to be looked at again or belongs to others."""
        if self._expect is _Expect.IN_KEY:
            return self._in_key(char)
        if self._expect is _Expect.IN_VALUE:
            return self._in_value(char)
        if char in _SPACE:
            return 1
        match self._expect, char:
            case _Expect.OPEN, "{":
                self._expect = _Expect.KEY_OR_CLOSE
            case ((_Expect.KEY_OR_CLOSE | _Expect.COMMA_OR_CLOSE), "}"):
                self._close()
                return int(self.state is CallState.DONE)
            case ((_Expect.KEY_OR_CLOSE | _Expect.KEY), '"'):
                self._key, self._expect = "", _Expect.IN_KEY
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_CLOSE, ",":
                self._expect = _Expect.KEY
            case _Expect.VALUE, _:
                return self._begin_value(char)
            case _:
                self.state = CallState.BROKEN
                return 0
        return 1

    def _in_key(self, char: str) -> int:
        if char == '"':
            known = self._key == "name" or self._key in _ARGUMENT_KEYS | _OTHER_KEYS
            twice = self._key in _ARGUMENT_KEYS and self._has_arguments
            if not known or twice or (self._key == "name" and self._name is not None):
                self.state = CallState.BROKEN
                return 0
            self._expect = _Expect.COLON
            return 1
        self._key += char
        return 1

    def _begin_value(self, char: str) -> int:
        is_named = self._key == "name"
        if (is_named and char != '"') or (self._key in _ARGUMENT_KEYS and char not in '{"'):
            self.state = CallState.BROKEN
            return 0
        self._value, self._depth = [], 0
        self._in_string = self._escaped = False
        self._has_arguments |= self._key in _ARGUMENT_KEYS
        self._expect = _Expect.IN_VALUE
        return 0

    def _in_value(self, char: str) -> int:
        """Take a character of a value, or see that it has ended before it."""
        if self._in_string:
            self._put(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self._end_value_at_depth_0()
            return 1
        if self._depth == 0 and (char in _SPACE or char in ",}]"):
            self._end_value()  # of a number, true, false or null
            return 0
        self._put(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._end_value_at_depth_0()
        return 1

    def _put(self, char: str) -> None:
        streams = self._key in _ARGUMENT_KEYS and (self._value or [char])[0] == "{"
        if streams:
            self._waiting.append(char)
            self._value = self._value or [char]
        else:
            self._value.append(char)

    def _end_value_at_depth_0(self) -> None:
        if self._depth == 0:
            self._end_value()

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_CLOSE
        if self._key == "name":
            self._name = _string(self._value)
            if not self._name:
                self.state = CallState.BROKEN
        elif self._key in _ARGUMENT_KEYS and self._value[0] == '"':
            text = _string(self._value)
            if text is None or not _is_object(text):
                self.state = CallState.BROKEN
            else:
                self._waiting.append(text)

    def _close(self) -> None:
        if self._name is None:
            self.state = CallState.BROKEN
            return
        self.state = CallState.DONE
        if not self._has_arguments:
            self._waiting.append("{}")

    def _collected(self) -> Iterator[Piece]:
        """Yield what waits, if the name is known and arguments have begun."""
        if self._name is None or not self._waiting:
            return
        if not self.has_begun:
            self.has_begun = True
            yield ToolCallBegin(self._index, self._name)
        yield ToolCallArguments(self._index, "".join(self._waiting))
        self._waiting.clear()


class JsonCalls:
    """The JSON calls of an answer, one at a time; one broken before its name is handed on becomes text."""

    def __init__(self, outlet: TextOutlet) -> None:
        self._outlet = outlet
        self._num_calls = 0
        self._call: JsonCall | None = None
        self._raw = ""

    @property
    def is_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._call is not None

    def begin(self, before: str) -> None:
        """A call comes now; `before` becomes text with it if it turns out to be none."""
        self._call, self._raw = JsonCall(self._num_calls), before

    def push(self, text: str) -> Generator[Piece, None, tuple[CallState, str]]:
        """Yield what became certain of the open call; return how it stands and what is left of `text`."""
        call = self._call
        assert call is not None, "no call is open"
        used, pieces = call.push(text)
        yield from pieces
        if call.has_begun:
            self._outlet.call()
        else:
            self._raw += text[:used]
        if call.state is CallState.READING:
            return CallState.READING, ""
        self._call = None
        if not call.has_begun:
            yield from self._outlet.push(self._raw)
            return CallState.BROKEN, text[used:]
        self._num_calls += 1
        return CallState.DONE, text[used:]

    def flush(self) -> Iterator[Piece]:
        """The answer has ended: yield an open call's text, unless it was handed on as a call."""
        if self._call is not None and not self._call.has_begun:
            yield from self._outlet.push(self._raw)


def _string(value: Sequence[str]) -> str | None:
    try:
        text = json.loads("".join(value), strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
