"""Tells an answer's reasoning, text and tool calls apart, however the text is cut. Sans-I/O.

Owns where reasoning begins and ends, and which parser reads the calls. Knows no tokens, no request and
no interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, assert_never

from thermocline.text.hermes_calls import HermesCalls
from thermocline.text.pieces import Piece, ReasoningPiece, TextPiece
from thermocline.text.plain_calls import PlainCalls
from thermocline.text.tool_calls import num_held
from thermocline.text.tool_formats import THINK_BEGIN, THINK_END, ToolFormat
from thermocline.text.xml_calls import XmlCalls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thermocline.text.tool_calls import CallParser

_SPACE: Final = " \t\r\n"


class Thinking(Enum):
    """Where an answer's reasoning may be."""

    NEVER = auto()
    MAY_BEGIN = auto()
    """The answer may open it."""
    HAS_BEGUN = auto()
    """The prompt has opened it."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What an answer may consist of; `parser()` makes a parser of it.

    calls: how tools are called; None if there are none to call. schemas: of each tool's arguments.
    """

    thinking: Thinking = Thinking.NEVER
    calls: ToolFormat | None = None
    schemas: Mapping[str, Mapping[str, Any]] | None = None

    def parser(self) -> ReasoningParser:
        """Return the parser of one answer."""
        return ReasoningParser(self.thinking, self._call_parser())

    def _call_parser(self) -> CallParser:
        match self.calls:
            case None:
                return NoCalls()
            case ToolFormat.HERMES:
                return HermesCalls()
            case ToolFormat.XML:
                return XmlCalls(self.schemas or {})
            case ToolFormat.PLAIN:
                return PlainCalls()
            case _:
                assert_never(self.calls)


class NoCalls:
    """All is text."""

    def push(self, text: str) -> Iterator[Piece]:
        """Yield `text`."""
        if text:
            yield TextPiece(text)

    def flush(self) -> Iterator[Piece]:
        """Yield nothing: nothing is held back."""
        yield from ()


class _At(Enum):
    """START: reasoning may begin. GAP: it has ended, and space before the answer is passed over."""

    START = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningParser:
    """Takes the reasoning from the start of an answer; the rest goes to `calls`.

    Space around reasoning is dropped.
    """

    def __init__(self, thinking: Thinking, calls: CallParser) -> None:
        self._calls = calls
        self._held = ""
        self._has_reasoned = False
        match thinking:
            case Thinking.NEVER:
                self._at = _At.ANSWER
            case Thinking.MAY_BEGIN:
                self._at = _At.START
            case Thinking.HAS_BEGUN:
                self._at = _At.REASONING

    def __repr__(self) -> str:
        return f"ReasoningParser({self._at.name}, held={self._held!r})"

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._at is _At.REASONING

    def push(self, text: str) -> tuple[Piece, ...]:
        """Return what became certain; text that may begin a marker is held back."""
        pieces: list[Piece] = []
        text, self._held = self._held + text, ""
        if self._at is _At.START:
            text = self._in_start(text)
        if self._at is _At.REASONING:
            text = self._in_reasoning(text, pieces)
        if self._at is _At.GAP:
            text = text.lstrip(_SPACE)
            if text:
                self._at = _At.ANSWER
        if self._at is _At.ANSWER and text:
            pieces.extend(self._calls.push(text))
        return tuple(pieces)

    def flush(self) -> tuple[Piece, ...]:
        """Return what was held back; the answer has ended."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._at is _At.REASONING:
            self._add_reasoning(held.rstrip(_SPACE), pieces)
        elif held:
            pieces.extend(self._calls.push(held))
        pieces.extend(self._calls.flush())
        return tuple(pieces)

    def _in_start(self, text: str) -> str:
        """See whether reasoning begins; return what is left of `text`."""
        rest = text.lstrip(_SPACE)
        if rest.startswith(THINK_BEGIN):
            self._at = _At.REASONING
            return rest[len(THINK_BEGIN) :]
        if THINK_BEGIN.startswith(rest):
            self._held = text
            return ""
        self._at = _At.ANSWER
        return text

    def _in_reasoning(self, text: str, pieces: list[Piece]) -> str:
        thought, end, rest = text.partition(THINK_END)
        if end:
            self._at = _At.GAP
            self._add_reasoning(thought.rstrip(_SPACE), pieces)
            return rest
        # Space is held with what follows it, since it is dropped before the end.
        shown = text[: len(text) - num_held(text, (THINK_END,))].rstrip(_SPACE)
        self._held = text[len(shown) :]
        self._add_reasoning(shown, pieces)
        return ""

    def _add_reasoning(self, text: str, pieces: list[Piece]) -> None:
        if not self._has_reasoned:
            text = text.lstrip(_SPACE)
        if text:
            self._has_reasoned = True
            pieces.append(ReasoningPiece(text))
