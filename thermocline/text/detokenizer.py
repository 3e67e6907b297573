"""Token ids to text, one id at a time, in whole characters only.

Owns the bytes of a character that has not fully arrived. It knows no stop strings and no requests.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection


class TokenBytes(Protocol):
    """What the detokenizer needs to know of a vocabulary (`Tokenizer` has it)."""

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token."""
        ...

    def is_control(self, token_id: int) -> bool:
        """True for tokens that steer the model and are no text."""
        ...


class Detokenizer:
    """Incremental decoder of one stream.

    The pieces that `push` and `flush` return, joined, equal the bytes of all tokens decoded at once
    with errors="replace"; each piece is valid text by itself. Control tokens add nothing unless
    `show_control` is set, or they are among `shown`.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        show_control: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this token, "" while a character is still cut.

        Raises RequestError if the vocabulary has no such id.
        """
        piece = self._tokenizer.token_bytes(token_id)
        hides = not self._show_control and token_id not in self._shown
        if hides and self._tokenizer.is_control(token_id):
            return ""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """End of the stream: U+FFFD for the part of a character that is left, else "".

        The detokenizer may be used for another stream afterwards.
        """
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
