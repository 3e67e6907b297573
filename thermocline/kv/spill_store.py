"""Moves the bytes of spilt parts between an engine's cache, memory, and a file without a name. Knows no request.

Whoever calls it does so from one thread at a time. The file has no name: nothing of it is left after the process, however
that ends, and nobody else can open it. Behind each part of it stands a checksum of its key and bytes: what the
disk did not keep is never taken for a part.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import ConfigError
from thermocline.kv.memory import reserve
from thermocline.kv.spill_index import CHECKSUM_BYTES, PartKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any, Self

    from thermocline.kv.cache import SequenceCache
    from thermocline.kv.spill_index import Demotion, PartCopy, PartKey, SpillPlace
    from thermocline.messages import LayerIndex

_MAX_VECTORS: Final = 512  # Linux takes 1,024 in one call


class PartBytes:
    """Where the cache has the bytes of each part."""

    def __init__(self, cache: SequenceCache, window_layers: Collection[LayerIndex]) -> None:
        """window_layers: those with blocks of their own, if there are any."""
        self._cache = cache
        own = [layer for layer in cache.kv.layers if layer not in window_layers]
        self._layers = {
            PartKind.BLOCK: own,
            PartKind.WINDOW: [layer for layer in cache.kv.layers if layer in window_layers],
        }

    def views(self, kind: PartKind, number: int) -> list[memoryview]:
        """Return the bytes of a part, to be read or written."""
        if kind is PartKind.STATE:
            assert self._cache.states is not None, "no layer is recurrent"
            found = [
                array[number].reshape(-1).view(np.uint8)
                for states in self._cache.states.all_layers
                for array in (states.conv, states.recurrent)
            ]
        else:
            caches = map(self._cache.kv.layer, self._layers[kind])
            found = [array[number].reshape(-1) for each in caches for array in each.arrays]
        contents: list[Any] = [array for array in found if array.nbytes]
        return [memoryview(content) for content in contents]

    def num_bytes(self, kind: PartKind) -> int:
        """Return the size of each part of a kind; 0 where there are none."""
        if kind is PartKind.STATE:
            return 0 if self._cache.states is None else self._cache.states.slot_bytes
        return sum(view.nbytes for view in self.views(kind, 0)) if self._layers[kind] else 0


class MemoryLevel:
    """Memory that becomes real where it is written."""

    def __init__(self, num_bytes: int) -> None:
        fix = "choose a smaller --cache-spill"
        self._bytes = reserve(num_bytes, "what leaves the key-value cache", fix)

    def write(self, _: PartKey, place: SpillPlace, views: Sequence[memoryview]) -> None:
        """Write a part at its place."""
        at = place.offset
        for view in views:
            np.copyto(self._bytes[at : at + view.nbytes], np.frombuffer(view, np.uint8))
            at += view.nbytes

    def read(self, _: PartKey, place: SpillPlace, views: Sequence[memoryview]) -> bool:
        """Read the part at a place."""
        at = place.offset
        for view in views:
            np.copyto(np.frombuffer(view, np.uint8), self._bytes[at : at + view.nbytes])
            at += view.nbytes
        return True

    def view(self, place: SpillPlace) -> memoryview:
        """Return the bytes at a place."""
        content: Any = self._bytes[place.offset : place.offset + place.num_bytes]
        return memoryview(content)

    def close(self) -> None:
        """Do nothing: memory goes with its last view."""


class FileLevel:
    """A file in a folder, without a name there."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError for a folder in which no file can be made."""
        self.descriptor = _nameless_file(folder)
        """Of the open file."""

    def write(self, key: PartKey, place: SpillPlace, views: Sequence[memoryview]) -> None:
        """Write a part at its place, and its checksum behind it. Raises OSError, as for a full disk."""
        checksum = memoryview(_checksum(key, views).to_bytes(CHECKSUM_BYTES, "little"))
        _move_all(os.pwritev, self.descriptor, place.offset, [*views, checksum])

    def read(self, key: PartKey, place: SpillPlace, views: Sequence[memoryview]) -> bool:
        """Read the part at a place; False if its bytes are not what was written. Raises OSError."""
        checksum = bytearray(CHECKSUM_BYTES)
        _move_all(os.preadv, self.descriptor, place.offset, [*views, memoryview(checksum)])
        return int.from_bytes(checksum, "little") == _checksum(key, views)

    def close(self) -> None:
        """Close the file, and with it free its bytes on the disk."""
        os.close(self.descriptor)


class SpillStore:
    """The bytes of all levels. Leave its context to free them."""

    def __init__(self, parts: PartBytes, memory_bytes: int, folder: str | None) -> None:
        """Levels are as the index has them: memory, if there is any, then the file, if a folder is given.

        Raises ConfigError for memory that is not there, or a folder that takes no file.
        """
        self.parts = parts
        self._memory = MemoryLevel(memory_bytes) if memory_bytes else None
        self._file = None if folder is None else FileLevel(folder)
        self._levels = [level for level in (self._memory, self._file) if level is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for level in self._levels:
            level.close()

    def save(self, copy: PartCopy) -> None:
        """Write a part of the cache to its place. Raises OSError."""
        views = self.parts.views(copy.key.kind, copy.number)
        self._levels[copy.place.level].write(copy.key, copy.place, views)

    def load(self, copy: PartCopy) -> bool:
        """Read a part into the cache; False if its bytes are not what was written. Raises OSError."""
        views = self.parts.views(copy.key.kind, copy.number)
        return self._levels[copy.place.level].read(copy.key, copy.place, views)

    def demote(self, demotion: Demotion) -> None:
        """Copy a part from memory to the file. Raises OSError."""
        assert self._memory is not None, "parts leave memory alone"
        self._levels[demotion.target.level].write(
            demotion.key, demotion.target, [self._memory.view(demotion.source)[:-CHECKSUM_BYTES]]
        )


def _checksum(key: PartKey, views: Sequence[memoryview]) -> int:
    value = zlib.crc32(key.kind.value.encode() + key.tokens)
    for view in views:
        value = zlib.crc32(view, value)
    return value


def _move_all(
    move: Any,  # noqa: ANN401 - os.pwritev or os.preadv, which differ in their types
    descriptor: int,
    offset: int,
    views: Sequence[memoryview],
) -> None:
    """Move all bytes of views at an offset. Raises OSError, also where the file ends before."""
    left = [view.cast("B") for view in views if view.nbytes]
    while left:
        moved = move(descriptor, left[:_MAX_VECTORS], offset)
        if not moved:
            raise OSError("the file ends before what was written there")
        offset += moved
        while moved and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]


def _nameless_file(folder: str) -> int:
    """Return the descriptor of a new file for this user alone, which has no name."""
    try:
        with suppress(OSError, AttributeError):  # not every file system and kernel has these
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        descriptor, name = tempfile.mkstemp(prefix=".thermocline-spill-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"--cache-spill-dir {folder} takes no file ({error.strerror}): name a folder that may be written"
        ) from error
    pathlib.Path(name).unlink()
    return descriptor
