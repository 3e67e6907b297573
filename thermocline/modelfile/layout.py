"""Owns the typed facts of a GGUF header: metadata with typed accessors, and the tensor table's rows.

It does NOT read files and does not know which keys a model needs; header.py parses into these types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np

from thermocline.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from thermocline.modelfile.formats import BlockFormat

Default = TypeVar("Default")
Value = int | float | bool | str | tuple["Value", ...]


class ValueType(IntEnum):
    """The GGUF type of a metadata value, by its number in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_FLOAT_TYPES = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})
_INT_TYPES = frozenset(ValueType) - _FLOAT_TYPES - {
    ValueType.BOOL,
    ValueType.STRING,
    ValueType.ARRAY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StringArray:
    """Strings that were checked to be UTF-8 but are decoded only on request.

    `data` is the array as stored, `starts` and `ends` are each string's bounds in it, int64 [n].
    """

    data: bytes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def decode(self) -> tuple[str, ...]:
        """Return the strings; about 0.2 us each."""
        data = self.data
        bounds = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return tuple([data[start:end].decode() for start, end in bounds])


@dataclass(frozen=True, slots=True)
class NestedArray:
    """An array of arrays. No key that a model needs holds one."""

    elements: tuple[Stored, ...]


Stored = int | float | bool | str | StringArray | NestedArray | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One metadata value: its type (of the elements, if it is an array), content and file offset."""

    type: ValueType
    is_array: bool
    stored: Stored
    offset: int

    @property
    def type_name(self) -> str:
        """The type as a person writes it: "UINT32" or "array of STRING"."""
        return f"array of {self.type.name}" if self.is_array else self.type.name


def _plain(stored: Stored) -> Value:
    match stored:
        case StringArray():
            return stored.decode()
        case NestedArray():
            return tuple(_plain(element) for element in stored.elements)
        case np.ndarray():
            return tuple(stored.tolist())
        case _:
            return stored


class _Missing:
    """The type of the default that says: this key is required."""


_MISSING = _Missing()


class Metadata:
    """The key-value pairs of one model file, read-only.

    Every `get_*` returns `default` if the key is absent (ModelFileError naming key and file if no
    default was given), and raises ModelFileError if the value is of another type. Integers of any
    width are integers, also where a float is wanted; a bool never is a number.
    """

    __slots__ = ("_fields", "_path")

    def __init__(self, path: str, fields: Mapping[str, Field]) -> None:
        self._path = path
        self._fields = fields

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Metadata({self._path!r}, {len(self._fields)} keys)"

    def is_array(self, key: str) -> bool:
        """Return whether `key` is present and holds an array."""
        field = self._fields.get(key)
        return field is not None and field.is_array

    def raw(self, key: str) -> Value:
        """Return the value as Python has it: int, float, bool, str, or a tuple of these or of tuples."""
        return _plain(self._require(key).stored)

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: Default) -> str | Default: ...
    def get_str(self, key: str, default: object = _MISSING) -> object:
        """Return a string."""
        field = self._find(key, default)
        if field is None:
            return default
        if isinstance(field.stored, str):
            return field.stored
        raise self._wrong_type(key, field, "a string")

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: Default) -> int | Default: ...
    def get_int(self, key: str, default: object = _MISSING) -> object:
        """Return an integer of any width."""
        field = self._find(key, default)
        if field is None:
            return default
        if field.type in _INT_TYPES and isinstance(field.stored, int):
            return field.stored
        raise self._wrong_type(key, field, "an integer")

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: Default) -> float | Default: ...
    def get_float(self, key: str, default: object = _MISSING) -> object:
        """Return a finite number."""
        field = self._find(key, default)
        if field is None:
            return default
        if field.type is ValueType.BOOL or not isinstance(field.stored, int | float):
            raise self._wrong_type(key, field, "a number")
        number = float(field.stored)
        if not math.isfinite(number):
            raise self._error(key, f"is {number}, not a finite number", field)
        return number

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: Default) -> bool | Default: ...
    def get_bool(self, key: str, default: object = _MISSING) -> object:
        """Return a bool."""
        field = self._find(key, default)
        if field is None:
            return default
        if isinstance(field.stored, bool):
            return field.stored
        raise self._wrong_type(key, field, "a bool")

    @overload
    def get_strings(self, key: str) -> tuple[str, ...]: ...
    @overload
    def get_strings(self, key: str, default: Default) -> tuple[str, ...] | Default: ...
    def get_strings(self, key: str, default: object = _MISSING) -> object:
        """Return an array of strings, decoded at each call."""
        field = self._find(key, default)
        if field is None:
            return default
        if isinstance(field.stored, StringArray):
            return field.stored.decode()
        raise self._wrong_type(key, field, "an array of strings")

    @overload
    def get_ints(self, key: str) -> tuple[int, ...]: ...
    @overload
    def get_ints(self, key: str, default: Default) -> tuple[int, ...] | Default: ...
    def get_ints(self, key: str, default: object = _MISSING) -> object:
        """Return an array of integers of any width."""
        return self._get_numbers(key, default, _INT_TYPES, "an array of integers")

    @overload
    def get_floats(self, key: str) -> tuple[float, ...]: ...
    @overload
    def get_floats(self, key: str, default: Default) -> tuple[float, ...] | Default: ...
    def get_floats(self, key: str, default: object = _MISSING) -> object:
        """Return an array of numbers as floats; NaN and infinity are passed on."""
        numbers = self._get_numbers(key, default, _INT_TYPES | _FLOAT_TYPES, "an array of numbers")
        return numbers if numbers is default else tuple(map(float, numbers))  # type: ignore[call-overload]

    @overload
    def get_bools(self, key: str) -> tuple[bool, ...]: ...
    @overload
    def get_bools(self, key: str, default: Default) -> tuple[bool, ...] | Default: ...
    def get_bools(self, key: str, default: object = _MISSING) -> object:
        """Return an array of bools. Some converters write them as integers 0 and 1."""
        types = _INT_TYPES | {ValueType.BOOL}
        numbers = self._get_numbers(key, default, types, "an array of bools")
        if numbers is default:
            return numbers
        if not set(numbers) <= {0, 1}:  # type: ignore[call-overload]
            raise self._wrong_type(key, self._require(key), "an array of bools")
        return tuple(map(bool, numbers))  # type: ignore[call-overload]

    def _get_numbers(
        self, key: str, default: object, types: frozenset[ValueType], expected: str
    ) -> object:
        field = self._find(key, default)
        if field is None:
            return default
        if isinstance(field.stored, np.ndarray) and field.type in types:
            return tuple(field.stored.tolist())
        raise self._wrong_type(key, field, expected)

    def _find(self, key: str, default: object) -> Field | None:
        """Return the field, None for an absent key with a default; ModelFileError without one."""
        field = self._fields.get(key)
        return self._require(key) if field is None and default is _MISSING else field

    def _require(self, key: str) -> Field:
        field = self._fields.get(key)
        if field is None:
            raise self._error(key, "is missing", None)
        return field

    def _wrong_type(self, key: str, field: Field, expected: str) -> ModelFileError:
        return self._error(key, f"is {field.type_name}, expected {expected}", field)

    def _error(self, key: str, problem: str, field: Field | None) -> ModelFileError:
        return ModelFileError(
            self._path,
            f"metadata key {key!r} {problem}",
            offset=None if field is None else field.offset,
            fix="convert the model again with a current converter, or get another copy of the file",
        )


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor is.

    `shape` is in numpy order, slowest dimension first; `offset` is absolute in the file `path`,
    which is number `shard` of the model's files (0 for a single file); `nbytes` its stored bytes.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    path: str
    shard: int
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, that is of `shape[-1]` consecutive weights."""
        return self.format.row_bytes(self.shape[-1])


def without_padding(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape, slowest dimension first, without the ones at its slow end.

    GGUF stores the fastest dimension first, and ggml pads what is missing behind with ones: a vector of
    n numbers and a matrix of one row of n are one tensor to it, and writers differ in which they write.
    """
    sizes = list(shape)
    while len(sizes) > 1 and sizes[0] == 1:
        del sizes[0]
    return tuple(sizes)
