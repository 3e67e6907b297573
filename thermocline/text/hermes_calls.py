"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name", "arguments"}</tool_call>.

Owns their parser and their grammar. Knows no request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from thermocline.text.tool_calls import CallState, JsonCall, TextOutlet, num_held

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from thermocline.text.pieces import Piece

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_SPACE: Final = " \t\r\n"


def call_rule(name: str, arguments: str) -> str:
    """Return the rule of a call of `name` after CALL_BEGIN; arguments: the rule of their JSON."""
    begin = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
    end = json.dumps("}\n" + CALL_END)
    return f"{begin} {arguments} {end}"


class HermesCalls:
    """A call that is broken before its name and the start of its arguments are known becomes text."""

    def __init__(self) -> None:
        self._outlet = TextOutlet()
        self._num_calls = 0
        self._held = ""
        self._call: JsonCall | None = None
        self._raw = ""
        """Of the call: all that becomes text if it turns out to be none."""
        self._closing = False
        """Whether the call is whole, and its end marker is to come."""

    def push(self, text: str) -> Iterator[Piece]:
        """Yield what became certain."""
        text, self._held = self._held + text, ""
        while text:
            if self._call is None and not self._closing:
                text = yield from self._in_text(text)
            elif self._call is not None:
                text = yield from self._in_call(self._call, text)
            else:
                text = self._in_closing(text)

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back; the answer has ended."""
        if self._call is not None and not self._call.has_begun:
            yield from self._outlet.push(self._raw)
        elif not self._closing:
            yield from self._outlet.push(self._held)
        yield from self._outlet.flush()

    def _in_text(self, text: str) -> Generator[Piece, None, str]:
        before, marker, after = text.partition(CALL_BEGIN)
        if not marker:
            held = num_held(text, (CALL_BEGIN,))
            self._held = text[len(text) - held :]
            before = text[: len(text) - held]
        yield from self._outlet.push(before)
        if marker:
            self._call, self._raw = JsonCall(self._num_calls), CALL_BEGIN
        return after

    def _in_call(self, call: JsonCall, text: str) -> Generator[Piece, None, str]:
        used, pieces = call.push(text)
        yield from pieces
        if call.has_begun:
            self._outlet.call()
        else:
            self._raw += text[:used]
        if call.state is CallState.READING:
            return ""
        self._call = None
        if call.has_begun:
            self._num_calls += 1
            self._closing = True
        else:
            yield from self._outlet.push(self._raw)
        return text[used:]

    def _in_closing(self, text: str) -> str:
        """Pass over the end marker, if one comes; return what is left."""
        stripped = text.lstrip(_SPACE)
        if stripped.startswith(CALL_END):
            self._closing = False
            return stripped[len(CALL_END) :]
        if CALL_END.startswith(stripped):
            self._held = stripped
            return ""
        self._closing = False
        return text
