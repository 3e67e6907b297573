"""A bounds-checked reading position in a GGUF header: numbers, text and arrays of both.

Nothing is allocated from a count or length in the file before that many bytes were seen to be
there. It does NOT know what the values mean or in which order they stand.
"""

from __future__ import annotations

import struct
from array import array
from codecs import getincrementaldecoder
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from thermocline.errors import ModelFileError
from thermocline.modelfile.layout import StringArray, ValueType

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies need less than 32 MiB

_COPY_AGAIN = "the file is damaged or incomplete: download or copy it again"
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_UTF8_CHUNK_BYTES = 1 << 20

NUMBER_DTYPES: Mapping[ValueType, np.dtype[np.generic]] = MappingProxyType(
    {
        ValueType.UINT8: np.dtype("<u1"),
        ValueType.INT8: np.dtype("<i1"),
        ValueType.UINT16: np.dtype("<u2"),
        ValueType.INT16: np.dtype("<i2"),
        ValueType.UINT32: np.dtype("<u4"),
        ValueType.INT32: np.dtype("<i4"),
        ValueType.FLOAT32: np.dtype("<f4"),
        ValueType.BOOL: np.dtype("<u1"),
        ValueType.UINT64: np.dtype("<u8"),
        ValueType.INT64: np.dtype("<i8"),
        ValueType.FLOAT64: np.dtype("<f8"),
    }
)


class Cursor:
    """A bounds-checked reading position in a file's header."""

    def __init__(self, path: str, content: memoryview) -> None:
        self.path = path
        self.file_bytes = len(content)
        self.content = content[:MAX_HEADER_BYTES]
        self.position = 0

    @property
    def remaining(self) -> int:
        return len(self.content) - self.position

    def fail(self, what: str, *, at: int | None = None, fix: str = _COPY_AGAIN) -> NoReturn:
        offset = self.position if at is None else at
        raise ModelFileError(self.path, what, offset=offset, fix=fix)

    def need(self, num_bytes: int, what: str) -> None:
        """Fail unless `num_bytes` more bytes are there."""
        if num_bytes <= self.remaining:
            return
        if len(self.content) < self.file_bytes:
            self.fail(f"{what}: the header exceeds {MAX_HEADER_BYTES} bytes")
        self.fail(f"{what}: {num_bytes} bytes are needed, but the file ends after {self.remaining}")

    def take(self, num_bytes: int, what: str) -> memoryview:
        self.need(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return self.content[start : self.position]

    def read_u32(self, what: str) -> int:
        (value,) = _U32.unpack(self.take(4, what))
        return int(value)

    def read_u64(self, what: str) -> int:
        (value,) = _U64.unpack(self.take(8, what))
        return int(value)

    def read_count(self, what: str, min_entry_bytes: int, limit: int) -> int:
        """Read how many entries follow; each of them takes at least `min_entry_bytes`."""
        start = self.position
        count = self.read_u64(f"number of {what}")
        if count > limit:
            self.fail(f"{count} {what} are declared, more than the {limit} allowed", at=start)
        if count * min_entry_bytes > self.remaining:
            self.fail(
                f"{count} {what} are declared, but only {self.remaining} bytes follow", at=start
            )
        return count

    def read_text(self, what: str, max_bytes: int) -> str:
        """Read a length and that many bytes of UTF-8."""
        start = self.position
        length = self.read_u64(f"length of {what}")
        if length > max_bytes:
            self.fail(f"{what} has {length} bytes, more than the {max_bytes} allowed", at=start)
        text = self.take(length, what)
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8", at=start + 8 + error.start)

    def read_numbers(self, element_type: ValueType, count: int, what: str) -> np.ndarray:
        """Copy `count` numbers out of the file; bools are checked, but not converted."""
        dtype = NUMBER_DTYPES[element_type]
        start = self.position
        numbers = np.frombuffer(self.take(count * dtype.itemsize, what), dtype=dtype).copy()
        if element_type is ValueType.BOOL and count and numbers.max() > 1:
            at = int(np.argmax(numbers > 1))
            self.fail(f"{what} has the bool {numbers[at]}, which must be 0 or 1", at=start + at)
        return numbers

    def read_strings(self, count: int, what: str) -> StringArray:
        """Walk over `count` strings, check that they are UTF-8, and keep their bytes undecoded."""
        content, position, limit = self.content, self.position, len(self.content)
        start = position
        ends = array("q")
        read_length, append = _U64.unpack_from, ends.append
        try:
            for _ in range(count):
                position += 8 + read_length(content, position)[0]
                if position > limit:
                    break
                append(position - start)
        except struct.error:  # the length itself is cut off
            position = limit + 1
        self.need(position - start, f"string {len(ends)} of {what}")
        data = bytearray(self.take(position - start, what))
        string_ends = np.array(ends, dtype=np.int64)
        string_starts = np.concatenate([np.zeros(min(1, count), np.int64), string_ends[:-1]]) + 8
        # The lengths between the strings become zeros, so that one pass checks all the strings: a zero
        # is a character of its own, and so a character cut at a string's edge is still an error.
        flat = np.frombuffer(data, dtype=np.uint8)
        for byte in range(1, 9):
            flat[string_starts - byte] = 0
        strings = StringArray(bytes(data), string_starts, string_ends)
        if not _is_utf8(data):
            self._fail_at_bad_string(strings, start, what)
        return strings

    def _fail_at_bad_string(self, strings: StringArray, start: int, what: str) -> NoReturn:
        for index, (begin, end) in enumerate(zip(strings.starts, strings.ends, strict=True)):
            try:
                strings.data[begin:end].decode()
            except UnicodeDecodeError as error:
                at = start + int(begin) + error.start
                self.fail(f"string {index} of {what} is not valid UTF-8", at=at)
        self.fail(f"{what} is not valid UTF-8", at=start)


def _is_utf8(data: bytearray) -> bool:
    """Return whether `data` is UTF-8, decoding by chunks to bound the memory."""
    decoder = getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _UTF8_CHUNK_BYTES):
            decoder.decode(data[start : start + _UTF8_CHUNK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def quoted(text: str) -> str:
    """Quote text from the file for a message: no control characters, at most 80 characters."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
