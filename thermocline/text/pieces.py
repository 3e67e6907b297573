"""What an answer's text consists of once reasoning and tool calls are told apart. Knows neither tokens nor
any interface's names for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what is said to the user; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of the tool `name` begins. index: 0 for the answer's first call, then 1, ..."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON object that the call passes; the pieces of one call make it whole."""

    index: int
    text: str


Piece: TypeAlias = TextPiece | ReasoningPiece | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Turns one answer's text, however it is cut, into pieces. Sans-I/O; one parser per answer."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known.

        A token is a reasoning token if this was true before its text was pushed, or is true after.
        """
        ...

    def push(self, text: str) -> tuple[Piece, ...]:
        """Return what became certain; text that may begin a marker is held back."""
        ...

    def flush(self) -> tuple[Piece, ...]:
        """Return what was held back; the answer has ended."""
        ...
