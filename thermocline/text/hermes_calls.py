"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them: <tool_call>{"name", "arguments"}</tool_call>.

Owns their parser and their grammar. Knows no request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from thermocline.text.tool_calls import CallState, JsonCalls, TextOutlet, num_held

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
        self._calls = JsonCalls(self._outlet)
        self._held = ""
        self._closing = False
        """Whether the call is whole, and its end marker is to come."""

    def push(self, text: str) -> Iterator[Piece]:
        """Yield what became certain."""
        text, self._held = self._held + text, ""
        while text:
            if self._calls.is_open:
                state, text = yield from self._calls.push(text)
                self._closing = state is CallState.DONE
            elif self._closing:
                text = self._in_closing(text)
            else:
                text = yield from self._in_text(text)

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back; the answer has ended."""
        yield from self._calls.flush()
        if not self._closing:
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
            self._calls.begin(CALL_BEGIN)
        return after

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
