"""Tells an answer's reasoning, text and tool calls apart, however the text is cut. Sans-I/O.

Knows no tokens, no request and no interface.
"""

from __future__ import annotations

from thermocline.text.pieces import Piece, TextPiece


class TextParser:
    """Takes the whole answer as text."""

    @property
    def is_reasoning(self) -> bool:
        """False: nothing is."""
        return False

    def push(self, text: str) -> tuple[Piece, ...]:
        """Return `text` as a piece."""
        return (TextPiece(text),) if text else ()

    def flush(self) -> tuple[Piece, ...]:
        """Return nothing: nothing is held back."""
        return ()
