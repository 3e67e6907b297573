"""Tool calls with nothing around them: the answer is {"name", "arguments"}, or several, one after another.

Owns their parser and their grammar. Knows no request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from thermocline.text.tool_calls import CallState, JsonCalls, TextOutlet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.text.pieces import Piece

_SPACE: Final = " \t\r\n"


def call_rule(name: str, arguments: str) -> str:
    """Return the rule of a call of `name`; arguments: the rule of their JSON."""
    begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f'{begin} {arguments} "}}"'


class PlainCalls:
    """Calls stand at the start of the answer; from the first other text on, all is text."""

    def __init__(self) -> None:
        self._outlet = TextOutlet()
        self._calls = JsonCalls(self._outlet)
        self._space = ""
        self._is_text = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yield what became certain."""
        while text and not self._is_text:
            if self._calls.is_open:
                state, text = yield from self._calls.push(text)
                self._is_text = state is CallState.BROKEN
            else:
                text = self._at_start(text)
        if text:
            yield from self._outlet.push(text)

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back; the answer has ended."""
        yield from self._calls.flush()
        if not self._is_text:
            yield from self._outlet.push(self._space)
        yield from self._outlet.flush()

    def _at_start(self, text: str) -> str:
        """See whether a call begins; return what is left of `text`."""
        whole = self._space + text
        rest = whole.lstrip(_SPACE)
        self._space = whole[: len(whole) - len(rest)]
        if not rest:
            return ""
        if rest[0] == "{":
            self._calls.begin(self._space)
            self._space = ""
            return rest
        self._is_text = True
        return whole
