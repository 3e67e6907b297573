"""Writes small GGUF files: good ones through the gguf package, and raw ones byte by byte.

The raw builder knows where each field lies, so that a test can break exactly one of them. Knows no
architecture.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf.gguf_writer import GGUFValue

from scripts.kquants import quantize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Tensor = tuple[str, str, np.ndarray]

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
ALIGNMENT = 32


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[Tensor],
    *,
    version: int = 3,
    alignment: int | None = None,
    arch: str = "toy",
) -> Path:
    """Write a model and return its path.

    `metadata` maps full keys to bool, int, float, str, a non-empty sequence of one of these, or a
    `GGUFValue` where the exact type matters. `tensors` are (name, format name, float32 array in
    numpy order). `general.architecture` is set to `arch`.
    """
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        _add_value(writer, key, value)
    for name, format_name, x in tensors:
        raw = (
            x if format_name.startswith("I") and x.dtype.kind == "i" else _quantized(x, format_name)
        )
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[format_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version != 3:
        with path.open("r+b") as file:
            file.seek(4)
            file.write(struct.pack("<I", version))
    return path


# The same toy models are written by many tests, and most of their time is the K formats' search.
_known_blocks: dict[tuple[str, tuple[int, ...], bytes], np.ndarray] = {}


def _quantized(x: np.ndarray, format_name: str) -> np.ndarray:
    if len(x) > 1 and x.strides[0] == 0:  # the same numbers again and again
        return np.repeat(_quantized(x[:1], format_name), len(x), axis=0)
    if not format_name.endswith("_K"):
        return quantize(x, format_name)
    key = format_name, x.shape, hashlib.blake2b(np.ascontiguousarray(x)).digest()
    if key not in _known_blocks:
        _known_blocks[key] = quantize(x, format_name)
    return _known_blocks[key]


def write_shards(
    folder: Path,
    stem: str,
    metadata: Mapping[str, Any],
    parts: Sequence[Sequence[Tensor]],
    *,
    arch: str = "toy",
) -> list[Path]:
    """Write one shard per entry of `parts`, all metadata in the first; return their paths."""
    num_tensors = sum(len(part) for part in parts)
    paths = []
    for index, part in enumerate(parts):
        split = {
            "split.no": GGUFValue(index, gguf.GGUFValueType.UINT16),
            "split.count": GGUFValue(len(parts), gguf.GGUFValueType.UINT16),
            "split.tensors.count": GGUFValue(num_tensors, gguf.GGUFValueType.INT32),
        }
        name = f"{stem}-{index + 1:05d}-of-{len(parts):05d}.gguf"
        own = {**metadata, **split} if index == 0 else split
        paths.append(write_gguf(folder / name, own, part, arch=arch))
    return paths


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, GGUFValue):
        writer.add_key_value(key, value.value, value.type, value.sub_type)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        add = writer.add_int32 if value < 0 else writer.add_uint32
        add(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)  # add_string drops empty ones
    else:
        writer.add_array(key, list(value))


def u32(value: int) -> bytes:
    """Return `value` as the file stores a 32-bit number."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Return `value` as the file stores a count, length, dimension or offset."""
    return struct.pack("<Q", value)


def text(content: bytes, *, length: int | None = None) -> bytes:
    """Return a stored string; `length` replaces the true one."""
    return u64(len(content) if length is None else length) + content


def array_of(element_type: int, content: bytes, count: int) -> bytes:
    """Return a stored array's value: element type, count, elements."""
    return u32(element_type) + u64(count) + content


@dataclass
class RawTensor:
    """A row of the tensor table as stored; `dims` fastest first, `count` replaces their number."""

    name: bytes = b"a.weight"
    dims: Sequence[int] = (32, 2)
    type_id: int = 0
    offset: int = 0
    count: int | None = None


@dataclass
class RawField:
    """A metadata entry as stored: key, type number and the value's bytes."""

    key: bytes
    type_id: int
    value: bytes


@dataclass(frozen=True)
class Mark:
    """Where one fixed-size number of the file lies, and what it is."""

    what: str
    offset: int
    num_bytes: int


@dataclass
class RawFile:
    """A file to be built with any field wrong. Counts left None are the true ones."""

    fields: list[RawField] = field(
        default_factory=lambda: [RawField(b"general.architecture", STRING, text(b"toy"))]
    )
    tensors: list[RawTensor] = field(default_factory=lambda: [RawTensor()])
    data: bytes = bytes(range(256))
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    alignment: int = ALIGNMENT

    def build(self) -> bytes:
        """Return the whole file."""
        return self.build_marked()[0]

    def build_marked(self) -> tuple[bytes, list[Mark]]:
        """Return the whole file and the place of each number in its header, in file order."""
        out = bytearray()
        marks: list[Mark] = []

        def number(what: str, raw: bytes) -> None:
            marks.append(Mark(what, len(out), len(raw)))
            out.extend(raw)

        out += self.magic
        number("version", u32(self.version))
        number("num_tensors", u64(_or(self.num_tensors, len(self.tensors))))
        number("num_keys", u64(_or(self.num_keys, len(self.fields))))
        for entry in self.fields:
            number("key length", u64(len(entry.key)))
            out += entry.key
            number("value type", u32(entry.type_id))
            _mark_value(marks, entry, len(out))
            out += entry.value
        for tensor in self.tensors:
            number("name length", u64(len(tensor.name)))
            out += tensor.name
            number("num dimensions", u32(_or(tensor.count, len(tensor.dims))))
            for dimension in tensor.dims:
                number("dimension", u64(dimension))
            number("tensor type", u32(tensor.type_id))
            number("tensor offset", u64(tensor.offset))
        marks.append(Mark("header end", len(out), 0))
        out += bytes(-len(out) % self.alignment)
        return bytes(out) + self.data, marks

    def header_bytes(self) -> int:
        """Return the bytes before the padding that precedes the data."""
        return self.build_marked()[1][-1].offset


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _mark_value(marks: list[Mark], entry: RawField, start: int) -> None:
    """Mark the length of a string, the element type and count of an array, or a scalar."""
    if entry.type_id == STRING:
        marks.append(Mark("string length", start, 8))
    elif entry.type_id == ARRAY:
        marks.append(Mark("element type", start, 4))
        marks.append(Mark("array count", start + 4, 8))
    else:
        marks.append(Mark("scalar", start, len(entry.value)))
