"""What the tokenizer needs of an engine: the part that differs between kinds of vocabulary.

Owns the protocol only. It knows no special tokens: an engine sees the text between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class TextEngine(Protocol):
    """Cuts plain text into ids of one vocabulary. Immutable after construction, so thread-safe."""

    def encode(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of `text`, which holds no special token and is valid Unicode, a slice at a time.

        The memory that is taken meanwhile depends on the slice. Raises RequestError for a text that can not be cut.
        """
        ...

    def piece_bytes(self, text: str) -> bytes:
        """The bytes that the NORMAL token written `text` stands for."""
        ...

    def find_lacking(self, text: str) -> str | None:
        """The first thing in `text` that no token can express, named for an error, or None."""
        ...


SPACE_MARK = "\u2581"
"""What SentencePiece vocabularies write for a space."""


def named_byte(text: str) -> bytes:
    r"""b"\x0a" for "<0x0A>"; nothing for a BYTE token that is not written so."""
    try:
        return bytes.fromhex(text[3:5])
    except ValueError:
        return b""


def byte_name(byte: int) -> str:
    """The text of the token of a byte: "<0x0A>" for 10."""
    return f"<0x{byte:02X}>"


def find_unwritten(text: str, id_of: Mapping[str, int]) -> str | None:
    """The first character that has neither a token nor all of its bytes as tokens, named."""
    for char in sorted(set(text)):
        if char not in id_of:
            for byte in char.encode():
                if byte_name(byte) not in id_of:
                    return f"byte 0x{byte:02x}"
    return None
