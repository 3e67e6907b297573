"""Limits the depth of a JSON body, and the time that decoding it takes, while it arrives.

Works on bytes, so that checking a body costs little. Does not decide whether it is valid JSON.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from thermocline.errors import RequestError

MAX_DEPTH: Final = 64
MAX_DECODE_NS: Final = 40_000_000
"""Decoding holds the interpreter, and so the event loop, for about this long, and the time of copying its texts."""

DECODE_NS: Final = {
    "lists and objects": 1100,
    "names": 600,
    "texts": 260,
    "values": 90,
    "escapes": 15,
    "numbers with an exponent, or of many digits": 8000,
}
"""What one of each costs at most, measured with msgspec 0.22. A number such as 1.2345678901234567e-300 takes 8 us."""

DECODED_BYTES: Final = {
    "lists and objects": 240,
    "names": 128,
    "texts": 80,
    "values": 48,
    "numbers with an exponent, or of many digits": 32,
}
"""What one of each takes at most as a Python object with its place in another, besides the characters of texts."""

_MARKS: Final = b"[]{},:"
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in _MARKS)
# Change of depth by byte: + 1 for [ and {, - 1 for ] and }.
_STEPS: Final = tuple(1 if byte in b"[{" else -1 for byte in range(256))
# All digits become 0, and e becomes E.
_DIGITS: Final = bytes.maketrans(b"123456789e", b"000000000E")
# Each number of so many digits, and each further so many, counts as one that takes long.
_MANY_DIGITS: Final = b"0" * 24


class ShapeCheck:
    """Checks one body, piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self.found = dict.fromkeys(DECODE_NS, 0)
        """How many of each there were."""
        self._is_in_string = False
        self._escape = b""
        """The backslash at the end of the last piece, if it escapes the next byte."""
        self._tail = b""
        """Digits at the end of the last piece that did not count yet, which the next one may continue."""

    @property
    def decoded_bytes(self) -> int:
        """What the values take when they are decoded, besides the characters of texts."""
        return sum(num_bytes * self.found[kind] for kind, num_bytes in DECODED_BYTES.items())

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. Raises RequestError beyond MAX_DEPTH or MAX_DECODE_NS."""
        found = self.found
        found["escapes"] += piece.count(b"\\")
        parts = self._unescaped(piece).split(b'"')
        # A text counts where it begins.
        found["texts"] += (len(parts) - self._is_in_string) // 2
        outside = b'"'.join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        self._count_numbers(outside)
        marks = outside.translate(None, _NO_MARKS)
        brackets = marks.translate(None, b",:")
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        num_names = marks.count(b":")
        found["lists and objects"] += num_opened
        found["names"] += num_names
        found["values"] += len(marks) - len(brackets) - num_names
        steps = map(_STEPS.__getitem__, brackets)
        if max(accumulate(steps, initial=self._depth)) > MAX_DEPTH:
            raise RequestError(
                f"the body is nested too deeply: send at most {MAX_DEPTH} levels of lists and objects"
            )
        self._depth += 2 * num_opened - len(brackets)
        self._check_time()

    def _count_numbers(self, outside: bytes) -> None:
        digits = self._tail + outside.translate(_DIGITS)
        long = digits.count(b"0E") + digits.count(_MANY_DIGITS)
        self.found["numbers with an exponent, or of many digits"] += long
        num_last = len(digits) - len(digits.rstrip(b"0"))
        self._tail = b"0" * (num_last % len(_MANY_DIGITS))

    def _check_time(self) -> None:
        times = {kind: count * DECODE_NS[kind] for kind, count in self.found.items()}
        if sum(times.values()) <= MAX_DECODE_NS:
            return
        most = max(times, key=times.__getitem__)
        raise RequestError(
            f"the body would take too long to decode: it has too many {most}, send fewer; a body of nothing else has "
            f"at most {MAX_DECODE_NS // DECODE_NS[most]}"
        )

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
