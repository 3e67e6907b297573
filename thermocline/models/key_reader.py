"""Typed reads of one file's keys under its architecture's prefix: counts, flags, numbers, and what is refused.

Knows no key. A missing or impossible value is a ModelFileError that names the key.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from thermocline.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile

_FIX: Final = "convert or download the model again"
# Far above any published model: a larger value means that the file is damaged.
_MAX_SIZE: Final = 1 << 24


class KeyReader:
    """Reads `{architecture}.*` keys of one file."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self._prefix = f"{file.architecture}."

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a count of at least 1; the default, if given, where the key is missing."""
        return self._count(key, default, least=least)

    def sizes(self, key: str, num_layers: int, *, least: int = 1) -> tuple[int, ...]:
        """Return a count of at least 1 for each layer; the file may have one for all."""
        name = self._prefix + key
        if self._metadata.is_array(name):
            values = self._metadata.get_ints(name)[:num_layers]
        else:
            values = (self._metadata.get_int(name),) * num_layers
        if len(values) != num_layers or not all(least <= value <= _MAX_SIZE for value in values):
            raise self._bad(
                f"{name} must be a number of {least}..{_MAX_SIZE}, or one for each layer"
            )
        return values

    def integers(self, key: str, length: int, *, least: int = 0) -> tuple[int, ...]:
        """Return the first so many whole numbers of an array, which may be of any size."""
        values = self._metadata.get_ints(self._prefix + key)[:length]
        if len(values) < length or min(values, default=0) < least:
            raise self.bad(key, f"must have {length} entries, each at least {least}")
        return values

    def same_size(self, key: str, num_layers: int, default: int) -> int:
        """Return a count of at least 1 that all layers have in common."""
        if self._prefix + key not in self._metadata:
            return default
        values = set(self.sizes(key, num_layers))
        if len(values) > 1:
            raise self._unsupported(f"{self._prefix}{key} that differs by layer: {sorted(values)}")
        return values.pop()

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; the default, if given, where the key is missing."""
        name = self._prefix + key
        if default is not None and name not in self._metadata:
            return default
        return self._metadata.get_bool(name)

    def required_flags(self, key: str, num_layers: int) -> tuple[bool, ...]:
        """Return a boolean for each layer."""
        flags = self.layer_flags(key, num_layers)
        if len(flags) != num_layers:
            raise self._bad(f"{self._prefix}{key} must have a boolean for each layer")
        return flags

    def layer_flags(self, key: str, num_layers: int) -> tuple[bool, ...]:
        """Return a boolean for each layer; () where the key holds no array."""
        name = self._prefix + key
        if not self._metadata.is_array(name):
            return ()
        found = self._metadata.get_bools(name)
        if len(found) < num_layers:
            raise self._bad(f"{name} has {len(found)} entries for {num_layers} layers")
        return found[:num_layers]

    def count(self, key: str, default: int | None = None) -> int:
        """Return a count of at least 0; the default, if given, where the key is missing."""
        return self._count(key, default, least=0)

    def positive_float(
        self, key: str, default: float | None = None, zero: float | None = None
    ) -> float:
        """Return a finite number above zero. zero: what 0 stands for, where it is allowed."""
        name = self._prefix + key
        metadata = self._metadata
        value = metadata.get_float(name) if default is None else metadata.get_float(name, default)
        if value == 0 and zero is not None:
            return zero
        if not (math.isfinite(value) and value > 0):
            raise self._bad(f"{name} is {value}; it must be a positive number")
        return value

    def require_equal(self, key: str, expected: int) -> None:
        """Refuse the file if the key is there and differs from what this architecture supports."""
        value = self._metadata.get_int(self._prefix + key, default=expected)
        if value != expected:
            raise self._unsupported(f"{self._prefix}{key} = {value} (only {expected} is supported)")

    def bad(self, key: str, what: str) -> ModelFileError:
        """Return the error of a key whose value does not go with others. what: a sentence about it without its subject."""
        return self._bad(f"{self._prefix}{key} {what}")

    def unsupported(self, what: str) -> UnsupportedModelError:
        """Return the error of something that is not supported. what: its key and value, or words for it."""
        return self._unsupported(f"{self._prefix}{what}")

    def require_alike(self, fix: str, *keys: str) -> None:
        """Refuse the file if one of these keys has a number for each layer. fix: what can be done."""
        for name in (self._prefix + key for key in keys):
            if self._metadata.is_array(name):
                raise self._unsupported(f"{name} of each layer's own", fix)

    def refuse(self, *keys: str) -> None:
        """Refuse the file if it has one of these keys: they would change the result."""
        for name in (self._prefix + key for key in keys):
            if name in self._metadata:
                raise self._unsupported(name)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The file's tensors by name."""
        return self._file.tensors

    def has(self, key: str) -> bool:
        """Whether the file states this key."""
        return self._prefix + key in self._metadata

    def _count(self, key: str, default: int | None, *, least: int) -> int:
        name = self._prefix + key
        metadata = self._metadata
        value = metadata.get_int(name) if default is None else metadata.get_int(name, default)
        if not least <= value <= _MAX_SIZE:
            raise self._bad(f"{name} is {value}; it must lie in {least}..{_MAX_SIZE}")
        return value

    def _bad(self, what: str) -> ModelFileError:
        return ModelFileError(self._file.path, what, fix=_FIX)

    def _unsupported(self, what: str, fix: str = "use a file without it") -> UnsupportedModelError:
        return UnsupportedModelError(
            self._file.path,
            f"the {self._file.architecture} model needs something that is not supported",
            unsupported=(what,),
            fix=fix,
        )
