"""Limits the depth and the number of values of a JSON body, while it arrives.

Works on bytes, so that checking a body costs little. Does not decide whether it is valid JSON.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from thermocline.errors import RequestError

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 1 << 16
"""Lists and objects in one body."""
MAX_VALUES: Final = 1 << 19
"""Values in one body. Decoding so many blocks the event loop for about 40 ms."""
MAX_BACKSLASHES: Final = 1 << 22
"""In one body. Decoding so many escapes blocks the event loop for about 40 ms."""

_MARKS: Final = b'"[]{},'
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in _MARKS)
# Change of depth by byte: + 1 for [ and {, - 1 for ] and }.
_STEPS: Final = tuple(1 if byte in b"[{" else -1 for byte in range(256))


class ShapeCheck:
    """Checks one body, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._num_values = self._num_containers = self._num_backslashes = 0
        self._is_in_string = False
        self._escape = b""
        """The backslash at the end of the last piece, if it escapes the next byte."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. Raises RequestError beyond MAX_DEPTH, MAX_CONTAINERS, MAX_VALUES or MAX_BACKSLASHES."""
        self._num_backslashes += piece.count(b"\\")
        if self._num_backslashes > MAX_BACKSLASHES:
            raise RequestError(
                f"the body has too many escapes: send at most {MAX_BACKSLASHES} backslashes, and characters that need "
                "none as they are"
            )
        marks = self._unescaped(piece).translate(None, _NO_MARKS)
        parts = marks.split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        brackets = outside.translate(None, b",")
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        self._num_containers += num_opened
        self._num_values += num_opened + len(outside) - len(brackets)
        if self._num_containers > MAX_CONTAINERS or self._num_values > MAX_VALUES:
            raise RequestError(
                f"the body has too many values: send at most {MAX_VALUES}, and at most "
                f"{MAX_CONTAINERS} lists and objects"
            )
        steps = map(_STEPS.__getitem__, brackets)
        if max(accumulate(steps, initial=self._depth)) > MAX_DEPTH:
            raise RequestError(
                f"the body is nested too deeply: send at most {MAX_DEPTH} levels of lists and objects"
            )
        self._depth += 2 * num_opened - len(brackets)

    def _unescaped(self, piece: bytes) -> bytes:
        """Return the piece without escaped backslashes and quotation marks."""
        data = self._escape + piece
        self._escape = b""
        if b"\\" not in data:
            return data
        # Escaped backslashes first: each one that remains escapes the next byte.
        data = data.replace(rb"\\", b"")
        if data.endswith(b"\\"):
            self._escape = b"\\"
            data = data[:-1]
        return data.replace(rb"\"", b"")
