"""Parses the header of one GGUF file from its bytes: version, metadata, tensor table.

Each number is checked before it is used. It does NOT open files and does not know shards.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from thermocline.modelfile.cursor import MAX_HEADER_BYTES, NUMBER_DTYPES, Cursor, quoted
from thermocline.modelfile.formats import FORMATS_BY_ID, BlockFormat, unknown_format
from thermocline.modelfile.layout import Field, Metadata, NestedArray, TensorInfo, ValueType
from thermocline.units import align_up, format_bytes

if TYPE_CHECKING:
    from typing import NoReturn

    from thermocline.modelfile.layout import Stored

MAGIC = b"GGUF"
# Specification of Git LFS: a pointer begins with its version, and is shorter than 1024 bytes.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_LFS_POINTER_BYTES = 1024
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_TENSOR_BYTES = (1 << 63) - 1
MAX_NESTED_ARRAYS = 1 << 16
MAX_NESTING = 8
ALIGNMENT_KEY = "general.alignment"

_CONVERT_AGAIN = "convert the model again with a current converter"

# Of an array in an array: type and count.
_MIN_ARRAY_BYTES = 4 + 8
# The smallest entry: key of one byte with its length, type, value / name, dimensions, type, offset.
_MIN_METADATA_ENTRY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header: all that stands before its tensor data, checked against the file's size."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    alignment: int


def parse_header(path: str, content: memoryview, shard: int, *, any_format: bool = False) -> Header:
    """Parse the header of the file `path` whose bytes are `content` (uint8).

    any_format: a tensor may have a type that is not known; it reaches to the next one. ModelFileError for anything that
    breaks the format.
    """
    cursor = Cursor(path, content)
    version = _read_version(cursor)
    num_tensors = cursor.read_count("tensors", _MIN_TENSOR_ENTRY_BYTES, MAX_TENSORS)
    num_keys = cursor.read_count("metadata keys", _MIN_METADATA_ENTRY_BYTES, MAX_METADATA_KEYS)
    fields = _read_fields(cursor, num_keys)
    alignment = _alignment(cursor, fields)
    entries = _read_tensor_table(cursor, num_tensors, alignment, shard, any_format=any_format)
    tensors = _place(cursor, entries, align_up(cursor.position, alignment))
    return Header(version, Metadata(path, MappingProxyType(fields)), tensors, alignment)


def _read_version(cursor: Cursor) -> int:
    if bytes(cursor.content[: len(_LFS_POINTER)]) == _LFS_POINTER:
        _fail_as_lfs_pointer(cursor)
    magic = bytes(cursor.take(len(MAGIC), "magic"))
    if magic != MAGIC:
        cursor.fail(
            f"the file starts with {magic!r}, not with {MAGIC!r}",
            at=0,
            fix="give the path of a GGUF model file; other formats must be converted to GGUF first",
        )
    start = cursor.position
    version = cursor.read_u32("version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version in SUPPORTED_VERSIONS:
        return version
    if swapped in range(1, 1 << 8):
        cursor.fail(
            f"the file is big-endian GGUF (version {swapped}), and only little-endian is supported",
            at=start,
            fix="get the little-endian file, or convert it with gguf-py's gguf_convert_endian.py",
        )
    cursor.fail(
        f"GGUF version {version} is not supported, only {SUPPORTED_VERSIONS}",
        at=start,
        fix=_CONVERT_AGAIN,
    )


def _fail_as_lfs_pointer(cursor: Cursor) -> NoReturn:
    """Raise for the few lines of text that stand for a large file in a Git repository."""
    text = bytes(cursor.content[:_MAX_LFS_POINTER_BYTES]).decode("ascii", "replace")
    size = re.search(r"^size (\d{1,18})$", text, re.MULTILINE)
    told = "" if size is None else f" of {format_bytes(int(size[1]))}"
    cursor.fail(
        f"this is a Git LFS pointer: some lines that stand for a model{told}, which was not downloaded",
        at=0,
        fix="run git lfs pull in its repository, or get the model with thermocline pull ORG/REPO",
    )


def _read_fields(cursor: Cursor, num_keys: int) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for index in range(num_keys):
        start = cursor.position
        key = cursor.read_text(f"metadata key {index}", MAX_KEY_BYTES)
        if not key:
            cursor.fail(f"metadata key {index} is empty", at=start)
        if key in fields:
            cursor.fail(f"metadata key {quoted(key)} appears twice", at=start, fix=_CONVERT_AGAIN)
        fields[key] = _read_field(cursor, f"metadata {quoted(key)}")
    return fields


def _read_field(cursor: Cursor, what: str) -> Field:
    value_type = _read_value_type(cursor, f"type of {what}")
    start = cursor.position
    if value_type is not ValueType.ARRAY:
        return Field(value_type, False, _read_scalar(cursor, value_type, what), start)
    element_type = _read_value_type(cursor, f"element type of {what}")
    if element_type is ValueType.ARRAY:
        return Field(element_type, True, _read_nested(cursor, what), start)
    return Field(element_type, True, _read_array(cursor, element_type, what), start)


def _read_nested(cursor: Cursor, what: str) -> NestedArray:
    """Read an array of arrays, each element of which begins with its own type and count."""
    start = cursor.position

    def read_count() -> int:
        return cursor.read_count(f"elements of {what}", _MIN_ARRAY_BYTES, MAX_NESTED_ARRAYS)

    # By depth: how many elements are still to come, and those that are there.
    open_arrays: list[tuple[int, list[Stored]]] = [(read_count(), [])]
    num_seen = 0
    while True:
        left, elements = open_arrays.pop()
        if left == 0:
            nested = NestedArray(tuple(elements))
            if not open_arrays:
                return nested
            open_arrays[-1][1].append(nested)
            continue
        open_arrays.append((left - 1, elements))
        num_seen += 1
        if num_seen > MAX_NESTED_ARRAYS or len(open_arrays) > MAX_NESTING:
            cursor.fail(
                f"{what} has more than {MAX_NESTED_ARRAYS} arrays in arrays, or nests them more than "
                f"{MAX_NESTING} deep",
                at=start,
                fix=_CONVERT_AGAIN,
            )
        element_type = _read_value_type(cursor, f"element type of {what}")
        if element_type is ValueType.ARRAY:
            open_arrays.append((read_count(), []))
        else:
            elements.append(_read_array(cursor, element_type, what))


def _read_value_type(cursor: Cursor, what: str) -> ValueType:
    start = cursor.position
    number = cursor.read_u32(what)
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"{what} is {number}, which is no metadata type", at=start)


def _read_scalar(cursor: Cursor, value_type: ValueType, what: str) -> Stored:
    if value_type is ValueType.STRING:
        return cursor.read_text(what, MAX_HEADER_BYTES)
    value = cursor.read_numbers(value_type, 1, what)[0].item()
    return bool(value) if value_type is ValueType.BOOL else value


def _read_array(cursor: Cursor, element_type: ValueType, what: str) -> Stored:
    is_text = element_type is ValueType.STRING
    min_bytes = 8 if is_text else NUMBER_DTYPES[element_type].itemsize
    count = cursor.read_count(f"elements of {what}", min_bytes, MAX_HEADER_BYTES)
    if is_text:
        return cursor.read_strings(count, what)
    numbers = cursor.read_numbers(element_type, count, what)
    return numbers.astype(bool) if element_type is ValueType.BOOL else numbers


def _alignment(cursor: Cursor, fields: dict[str, Field]) -> int:
    field = fields.get(ALIGNMENT_KEY)
    if field is None:
        return DEFAULT_ALIGNMENT
    value = field.stored
    if field.type is not ValueType.UINT32 or not isinstance(value, int):
        cursor.fail(f"{ALIGNMENT_KEY} is {field.type_name}, expected UINT32", at=field.offset)
    if value % 8 or value & (value - 1) or not 8 <= value <= MAX_ALIGNMENT:
        cursor.fail(
            f"{ALIGNMENT_KEY} is {value}, expected a power of two from 8 to {MAX_ALIGNMENT}",
            at=field.offset,
        )
    return value


def _read_tensor_table(
    cursor: Cursor, count: int, alignment: int, shard: int, *, any_format: bool
) -> list[tuple[TensorInfo, int]]:
    """Return the tensors, with offsets relative to the data's start, and where each is declared."""
    entries: list[tuple[TensorInfo, int]] = []
    names: set[str] = set()
    for index in range(count):
        start = cursor.position
        name = cursor.read_text(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if not name:
            cursor.fail(f"the name of tensor {index} is empty", at=start)
        if name in names:
            cursor.fail(f"tensor {quoted(name)} appears twice", at=start, fix=_CONVERT_AGAIN)
        names.add(name)
        tensor = _read_tensor(cursor, name, start, alignment, shard, any_format=any_format)
        entries.append((tensor, start))
    return entries


def _read_tensor(
    cursor: Cursor, name: str, start: int, alignment: int, shard: int, *, any_format: bool
) -> TensorInfo:
    what = f"tensor {quoted(name)}"
    shape = _read_shape(cursor, what)
    block_format = _read_format(cursor, what, any_format=any_format)
    row_elements = shape[-1]
    if row_elements % block_format.block_elements:
        cursor.fail(
            f"{what} has rows of {row_elements} elements, which {block_format.name} blocks "
            f"of {block_format.block_elements} do not divide",
            at=start,
        )
    nbytes = block_format.row_bytes(row_elements)
    for dimension in shape[:-1]:
        nbytes *= dimension
    if nbytes > MAX_TENSOR_BYTES:
        cursor.fail(f"{what} of shape {shape} would take {nbytes} bytes", at=start)
    offset_at = cursor.position
    offset = cursor.read_u64(f"offset of {what}")
    if offset % alignment:
        cursor.fail(f"{what} starts at {offset}, no multiple of {alignment}", at=offset_at)
    return TensorInfo(name, shape, block_format, cursor.path, shard, offset, nbytes)


def _read_shape(cursor: Cursor, what: str) -> tuple[int, ...]:
    """Read the dimensions, which the file holds fastest first, and return them slowest first."""
    start = cursor.position
    count = cursor.read_u32(f"number of dimensions of {what}")
    if not 1 <= count <= MAX_DIMENSIONS:
        cursor.fail(f"{what} has {count} dimensions, expected 1 to {MAX_DIMENSIONS}", at=start)
    start = cursor.position
    dimensions = [cursor.read_u64(f"dimension of {what}") for _ in range(count)]
    if min(dimensions) < 1 or max(dimensions) > MAX_TENSOR_BYTES:
        cursor.fail(f"{what} has a dimension of no or too many elements: {dimensions}", at=start)
    return tuple(reversed(dimensions))


def _read_format(cursor: Cursor, what: str, *, any_format: bool) -> BlockFormat:
    start = cursor.position
    type_id = cursor.read_u32(f"type of {what}")
    block_format = FORMATS_BY_ID.get(type_id)
    if block_format is None and any_format:
        return unknown_format(type_id)
    if block_format is None:
        cursor.fail(
            f"{what} has the type {type_id}, which is unknown",
            at=start,
            fix="the file is damaged, or of a format newer than this version: "
            "get another quantisation of the model",
        )
    return block_format


def _place(
    cursor: Cursor, entries: list[tuple[TensorInfo, int]], data_start: int
) -> tuple[TensorInfo, ...]:
    """Turn relative to absolute offsets; every tensor must be inside the file, none may overlap."""
    for tensor, declared_at in entries:
        end = data_start + tensor.offset + tensor.nbytes
        if end > cursor.file_bytes:
            cursor.fail(
                f"tensor {quoted(tensor.name)} ends at byte {end}, but the file has only "
                f"{cursor.file_bytes} bytes",
                at=declared_at,
            )
    in_file_order = sorted(entries, key=lambda entry: entry[0].offset)
    for (before, _), (after, declared_at) in itertools.pairwise(in_file_order):
        if before.offset + before.nbytes > after.offset:
            cursor.fail(
                f"tensors {quoted(before.name)} and {quoted(after.name)} overlap", at=declared_at
            )
    ends = [tensor.offset for tensor, _ in in_file_order[1:]] + [cursor.file_bytes - data_start]
    reach = {
        tensor.name: end - tensor.offset
        for (tensor, _), end in zip(in_file_order, ends, strict=False)
        if not tensor.format.block_bytes
    }
    return tuple(
        replace(
            tensor,
            offset=data_start + tensor.offset,
            nbytes=reach.get(tensor.name, tensor.nbytes),
        )
        for tensor, _ in entries
    )
