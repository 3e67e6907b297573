"""Tells an answer's reasoning, text and tool calls apart, however the text is cut. Sans-I/O.

Owns where reasoning begins and ends, and what the messages of an answer are. Knows no format by name, no
tokens, no request and no interface.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from thermocline.text.pieces import Piece, ReasoningPiece
from thermocline.text.tool_calls.call_parser import CallReader
from thermocline.text.tool_calls.feed import SPACE, Feed, begins_with, skip_space, takes, until
from thermocline.text.tool_calls.format_table import PLAIN, THINK
from thermocline.text.tool_calls.open_call import HeldSpace, TextOutlet
from thermocline.text.tool_calls.tool_formats import ThinkingMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.text.tool_calls.feed import Reading
    from thermocline.text.tool_calls.tool_formats import Messages, ReasoningMarks, ToolFormat

_MAX_HEADER_CHARS: Final = 512


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What an answer may consist of; `parser()` makes a parser of it.

    form: the model's format. can_call: whether there are tools to call. marks: around reasoning.
    schemas: of each tool's arguments. control: marks that are control tokens, and so never said.
    """

    thinking: ThinkingMode = ThinkingMode.NEVER
    form: ToolFormat = PLAIN
    can_call: bool = False
    marks: ReasoningMarks = THINK
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    control: frozenset[str] = frozenset()

    def parser(self) -> FormatParser:
        """Return the parser of one answer."""
        return FormatParser(self)


class FormatParser:
    """Reads one answer. Space around reasoning is dropped, and so is space beside calls."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._feed = Feed()
        self._pieces: list[Piece] = []
        self._outlet = TextOutlet(self._pieces.append)
        self._calls = CallReader(
            shape.form, shape.schemas or {}, self._feed, self._pieces.append, self._outlet
        )
        self._is_reasoning = shape.thinking is ThinkingMode.HAS_BEGUN
        self._drops = (*shape.form.drops, *shape.control)
        messages = shape.form.messages
        self._reading = self._answer() if messages is None else self._messages(messages)
        self._is_done = False

    def __repr__(self) -> str:
        return f"FormatParser({self._shape.form}, reasoning={self._is_reasoning}, {self._feed!r})"

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._is_reasoning

    def push(self, text: str) -> tuple[Piece, ...]:
        """Return what became certain; text that may begin a marker is held back."""
        self._feed.text += text
        return self._read_on()

    def flush(self) -> tuple[Piece, ...]:
        """Return what was held back; the answer has ended."""
        self._feed.has_ended = True
        return self._read_on()

    def _read_on(self) -> tuple[Piece, ...]:
        if not self._is_done:
            try:
                next(self._reading)
            except StopIteration:
                self._is_done = True
        pieces = tuple(self._pieces)
        self._pieces.clear()
        return pieces

    def _answer(self) -> Reading[None]:
        shape = self._shape
        if shape.thinking is ThinkingMode.HAS_BEGUN:
            yield from self._reasoning()
        elif shape.thinking is ThinkingMode.MAY_BEGIN:
            yield from self._start()
        if shape.can_call and shape.form.is_bare:
            for drop in shape.form.drops:
                yield from takes(self._feed, drop)
            yield from self._calls.bare_calls()
        yield from self._text(())
        self._outlet.flush()

    def _start(self) -> Reading[None]:
        """Read reasoning, if the answer begins with it."""
        self._feed.start_record()
        yield from skip_space(self._feed)
        if (yield from takes(self._feed, self._shape.marks.begin)):
            yield from self._reasoning()
        elif (yield from takes(self._feed, self._shape.marks.end)):
            yield from skip_space(self._feed)  # closed without having been opened
        else:
            self._outlet.push(self._feed.record())

    def _text(self, ends: tuple[str, ...], *, has_calls: bool = True) -> Reading[str | None]:
        """Read text, with calls in it, up to one of `ends`; return which."""
        shape = self._shape
        openings = self._calls.openings() if shape.can_call and has_calls else ()
        if shape.form.is_bare:
            openings = ()
        again = (shape.marks.begin,) if shape.marks.is_repeated and not ends else ()
        again = again if shape.thinking is not ThinkingMode.NEVER else ()
        envelope = shape.form.envelope
        marks = (*ends, *openings, *again, *envelope, *self._drops)
        while True:
            found = yield from until(self._feed, marks, self._outlet.push)
            if found is None or found in ends:
                return found
            if found in openings:
                yield from self._calls.calls(found)
            elif found in again:
                yield from self._reasoning()
            elif found in envelope:
                self._outlet.drop_space()

    def _reasoning(self) -> Reading[None]:
        """Read reasoning up to its end; a call ends it in formats where it does."""
        marks = self._shape.marks
        calls = self._shape.can_call and self._shape.form.ends_reasoning
        openings = self._calls.openings() if calls else ()
        found = yield from self._thought((marks.end, *marks.other_ends, *openings))
        if found is not None and found in openings:
            yield from self._calls.calls(found)
        elif found is not None:
            yield from skip_space(self._feed)

    def _thought(self, ends: tuple[str, ...]) -> Reading[str | None]:
        """Hand on reasoning without the space around it, up to one of `ends`; return which."""
        self._is_reasoning = True
        held, has_begun = HeldSpace(), False

        def put(text: str) -> None:
            nonlocal has_begun
            shown = held.push(text)
            shown = shown if has_begun else shown.lstrip(SPACE)
            if shown:
                has_begun = True
                self._pieces.append(ReasoningPiece(shown))

        found = yield from until(self._feed, ends, put)
        self._is_reasoning = found is None
        return found

    def _messages(self, form: Messages) -> Reading[None]:
        """Read one message after the other."""
        thinking = self._shape.thinking
        found: str | None = ""
        if thinking is ThinkingMode.HAS_BEGUN:
            found = yield from self._thought(self._message_ends(form))
        while found is not None:
            found = yield from self._message(form, found)
        self._outlet.flush()

    def _message_ends(self, form: Messages) -> tuple[str, ...]:
        starts = tuple(start for start in form.starts if start.strip() == start)
        return (*form.ends, *starts)

    def _message(self, form: Messages, before: str) -> Reading[str | None]:
        """Read a header and its message; return the mark at its end, which may begin the next header."""
        is_begun = before in form.starts or (form.begins_inside and not before)
        self._feed.start_record(before if before in form.starts else "")
        if before in form.ends:
            yield from skip_space(self._feed)
        header = yield from self._header(form, is_begun)
        ends = self._message_ends(form)
        if header is None:
            self._outlet.push(self._feed.record())
            return (yield from self._text(ends, has_calls=False))
        call = re.search(form.call, header)
        if re.match(form.reasoning, header):
            return (yield from self._thought(ends))
        if re.match(form.text, header):
            return (yield from self._text(ends, has_calls=False))
        if call and self._shape.can_call:
            yield from self._calls.named(call["name"])
        elif self._shape.can_call and re.match(form.calls, header):
            return (yield from self._text(ends))
        return (yield from until(self._feed, ends, lambda _: None))

    def _header(self, form: Messages, is_begun: bool) -> Reading[str | None]:
        """Read a header; None if none comes. What was taken is in the feed's record."""
        before = self._feed.record()
        if not is_begun:
            for start in form.starts:
                if (yield from begins_with(self._feed, start)):
                    break
            else:
                return None
        while True:
            header, end, _ = self._feed.text.partition(form.header_end)
            if len(header) > _MAX_HEADER_CHARS or not re.fullmatch(form.header, before + header):
                return None
            if end:
                self._feed.take(len(header) + len(end))
                return before + header
            if self._feed.has_ended:
                # A header that is cut is no text, where it can not be mistaken for any.
                return None if form.begins_inside else before
            yield
