"""Tool calls with nothing around them: the answer is {"name", "arguments"}, or several, one after another.

Owns their parser and their grammar. Knows no request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from thermocline.text.tool_calls import CallState, JsonCall, TextOutlet

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

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
        self._num_calls = 0
        self._space = ""
        self._call: JsonCall | None = None
        self._raw = ""
        self._is_text = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yield what became certain."""
        while text and not self._is_text:
            if self._call is None:
                text = self._at_start(text)
            else:
                text = yield from self._in_call(self._call, text)
        if text:
            yield from self._outlet.push(text)

    def flush(self) -> Iterator[Piece]:
        """Yield what was held back; the answer has ended."""
        if self._call is not None and not self._call.has_begun:
            yield from self._outlet.push(self._raw)
        elif not self._is_text:
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
            self._call, self._raw = JsonCall(self._num_calls), self._space
            self._space = ""
            return rest
        self._is_text = True
        return whole

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
        else:
            self._is_text = True
            yield from self._outlet.push(self._raw)
        return text[used:]
