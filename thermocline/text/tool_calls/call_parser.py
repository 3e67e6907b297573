"""Reads the calls of an answer, in the format that a row of the table tells. Sans-I/O.

One parser for all formats: it walks along the row's pattern. What looks like a call and is none becomes
text. Knows no format by name, no reasoning, no tokens and no request.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from thermocline.text.tool_calls.feed import begins_with, peek, run_of, skip_space, takes
from thermocline.text.tool_calls.json_calls import JsonCall
from thermocline.text.tool_calls.listed_arguments import read_keywords, read_parameters
from thermocline.text.tool_calls.literals import GEMMA, JSON
from thermocline.text.tool_calls.open_call import CallEndedError, NoCallError, OpenCall
from thermocline.text.tool_calls.tool_formats import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thermocline.text.pieces import Piece
    from thermocline.text.tool_calls.feed import Feed, Reading
    from thermocline.text.tool_calls.literals import Dialect
    from thermocline.text.tool_calls.open_call import TextOutlet
    from thermocline.text.tool_calls.tool_formats import PatternPart, ToolFormat

_NAME: Final = re.compile(r"[\w.\-/]*")
_ID: Final = re.compile(r"[\w.\-]*")
_MAX_NAME_CHARS: Final = 256


class CallReader:
    """The calls of one answer. schemas: of each tool's arguments."""

    def __init__(
        self,
        row: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        feed: Feed,
        say: Callable[[Piece], None],
        outlet: TextOutlet,
    ) -> None:
        self._row, self._schemas, self._feed = row, schemas, feed
        self._outlet = outlet
        form = row.messages
        pattern = row.call if form is None else row.call.partition(form.header_end)[2]
        self._parts = parts_of(pattern)
        self._sections = [
            _words_of(begin) for begin in (row.section_begin, *row.other_begins) if begin
        ]
        self._end = row.section_end.split()
        if self._sections and self._sections[0][-1] == "[" and self._end[0].startswith("]"):
            self._end[:1] = [word for word in ("]", self._end[0][1:]) if word]
        first = self._parts[0]
        self._first = first.split() if isinstance(first, str) else []
        self._call = OpenCall(feed, say, outlet)

    def openings(self) -> tuple[str, ...]:
        """Return the texts that begin calls among other text; none for calls without marks."""
        places = self._first[: 2 if self._row.may_lack_begin else 1]
        begins = (words[0] for words in self._sections)
        return tuple(dict.fromkeys((*begins, *places)))

    def calls(self, opening: str) -> Reading[None]:
        """Read what comes after one of the openings, which was taken."""
        self._feed.start_record(opening)
        for words in self._sections:
            if words[0] == opening:
                yield from self._in_section(words)
                return
        try:
            yield from self._one(self._first.index(opening) + 1)
        except NoCallError:
            self._outlet.push(self._feed.record())

    def bare_calls(self) -> Reading[bool]:
        """Read calls without marks, one after the other; return whether there was one."""
        num_calls = 0
        while True:
            self._feed.start_record()
            space = yield from skip_space(self._feed)
            if num_calls and (yield from takes(self._feed, self._row.separator.strip() or "\n")):
                space += yield from skip_space(self._feed)
            if not (yield from begins_with(self._feed, "{")):
                self._outlet.push(space)
                return num_calls > 0
            try:
                yield from self._one(0)
            except NoCallError:
                self._outlet.push(self._feed.record())
                return num_calls > 0
            num_calls += 1

    def named(self, name: str) -> Reading[None]:
        """Read the arguments of a call whose name is known."""
        self._feed.start_record()
        try:
            yield from self._arguments(name, JSON)
        except NoCallError:
            self._outlet.push(self._feed.record())
        except CallEndedError:
            pass

    def _in_section(self, words: list[str]) -> Reading[None]:
        num_calls = 0
        self._call.has_begun = False  # of an earlier section
        try:
            for word in words[1:]:
                yield from self._call.expect(word)
            while (yield from self._comes(num_calls)):
                yield from self._one(0)
                num_calls += 1
                self._feed.start_record()
        except NoCallError:
            self._outlet.push(self._feed.record())
            return
        for word in self._end:
            yield from self._call.pass_over(word)

    def _comes(self, num_calls: int) -> Reading[bool]:
        """Whether another call comes in the section. Raises NoCallError if it ends without any."""
        yield from skip_space(self._feed)
        between = self._row.separator.strip()
        goes_on = not (num_calls and between) or (yield from takes(self._feed, between))
        yield from skip_space(self._feed)
        if self._end and (yield from begins_with(self._feed, self._end[0])):
            if not num_calls:
                raise NoCallError
            return False
        if not num_calls:
            return True
        if not goes_on or (yield from peek(self._feed)) == "":
            return False
        return not self._first or (yield from begins_with(self._feed, self._first[0]))

    def _one(self, num_read: int) -> Reading[None]:
        """Read one call, of whose first words `num_read` were taken."""
        self._call.has_begun = False
        name = ""
        words = self._words(0)[num_read:]
        try:
            for place, part in enumerate(self._parts):
                if isinstance(part, str):
                    for word in words if place == 0 else self._words(place):
                        yield from (
                            self._call.pass_over(word)
                            if self._call.has_begun
                            else self._call.expect(word)
                        )
                elif part.kind == "name":
                    name = yield from self._name()
                else:
                    yield from self._slot(part.kind, name, "".join(self._words(place + 1)[:1]))
        except CallEndedError:
            return

    def _words(self, place: int) -> list[str]:
        part: PatternPart = self._parts[place] if place < len(self._parts) else ""
        return part.split() if isinstance(part, str) else []

    def _slot(self, kind: str, name: str, after: str) -> Reading[None]:
        match kind:
            case "json":
                yield from JsonCall(self._call, self._row.json).read()
            case "arguments":
                yield from self._arguments(name, JSON)
            case "dict":
                yield from self._arguments(name, GEMMA)
            case "keywords":
                yield from read_keywords(self._call, name, after)
            case "parameters":
                schema = self._schemas.get(name, {})
                yield from read_parameters(self._call, self._row, schema, name, after)
            case _:  # a number or an id
                yield from skip_space(self._feed)
                yield from run_of(self._feed, _ID, _MAX_NAME_CHARS)

    def _name(self) -> Reading[str]:
        yield from skip_space(self._feed)
        name = yield from run_of(self._feed, _NAME, _MAX_NAME_CHARS)
        if not name or not self._feed.text:
            raise NoCallError  # nothing, or cut
        return name

    def _arguments(self, name: str, dialect: Dialect) -> Reading[None]:
        """Read an object."""
        yield from skip_space(self._feed)
        if not (yield from begins_with(self._feed, "{")):
            raise NoCallError
        self._call.begin(name)
        yield from self._call.value(dialect, self._call.put)


def _words_of(begin: str) -> list[str]:
    """Return the words that begin a section; space may stand between them, and before a list's bracket."""
    words = begin.split()
    mark = words[-1].removesuffix("[")
    return (
        [*words[:-1], mark, "["] if mark != words[-1] and mark and not mark[-1].isalnum() else words
    )
