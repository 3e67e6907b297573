"""Maps one file of a model, and says later whether the file is still what was mapped.

Owns the mapping and its guard. Without a guard, a file that shrinks while it is mapped ends the process (SIGBUS); with
one, what can not be read is zeros, and `change` tells. Knows nothing of GGUF.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thermocline.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Bytes: TypeAlias = np.memmap[tuple[int, ...], np.dtype[np.uint8]]

_NOT_A_MODEL = "give the path of a GGUF model file"
# By what a guard returns.
_CHANGES = (
    None,
    "bytes of it could not be read, as it was truncated or its disk failed",
    "its size changed",
    "it was written to",
)


class MapGuard(Protocol):
    """Keeps the process alive where mapped bytes can not be read; the native core's `GuardedMap`."""

    def change(self) -> int:
        """Return what happened to the file: 0 nothing, 1 bytes could not be read, 2 another size, 3 another mtime."""
        ...

    def release(self) -> None:
        """Guard no longer: the mapping goes."""
        ...


class MappedFile:
    """A regular, non-empty file, mapped read-only. The mapping lives as long as somebody holds a view of it."""

    def __init__(
        self, path: str, make_guard: Callable[[Bytes, int], MapGuard] | None = None
    ) -> None:
        """Map it; never waits on a pipe or a device. Raises ModelFileError.

        make_guard: takes the mapping and the file's descriptor.
        """
        self.path = path
        self._guard: MapGuard | None = None
        try:
            _require_regular(path, os.stat(path))  # noqa: PTH116 (Path would lose what the user wrote)
            with io.FileIO(path, "r", opener=_open_without_waiting) as file:
                status = os.fstat(file.fileno())
                _require_regular(path, status)
                self._identity = status.st_dev, status.st_ino
                self.content: Bytes = np.memmap(
                    file, dtype=np.uint8, mode="r", shape=(status.st_size,)
                )
                if make_guard is not None:
                    self._guard = make_guard(self.content, file.fileno())
                    mapping = self.content.base
                    # Views outlive this object; the guard goes with the mapping itself.
                    weakref.finalize(mapping, self._guard.release).atexit = False
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: a NUL in the path, or it shrank meanwhile
            raise ModelFileError(
                path, f"the file can not be read ({error})", fix=_advice(error)
            ) from error

    def __repr__(self) -> str:
        return f"MappedFile({self.path!r}, {len(self.content)} bytes)"

    def change(self) -> str | None:
        """Return what happened to the mapped file since it was opened, None if nothing did. One system call."""
        return None if self._guard is None else _CHANGES[self._guard.change()]

    def is_replaced(self) -> bool:
        """Whether the path means another file by now, or none; the mapping still has the old one."""
        try:
            now = os.stat(self.path)  # noqa: PTH116 - kept as given
        except OSError:
            return True
        return (now.st_dev, now.st_ino) != self._identity


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise ModelFileError(path, f"this is {kind}, no file", fix=_NOT_A_MODEL)
    if status.st_size == 0:
        raise ModelFileError(path, "the file is empty", offset=0, fix="download or copy it again")


def _advice(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"check the path; {_NOT_A_MODEL}"
    if isinstance(error, PermissionError):
        return "allow this user to read the file (chmod, chown)"
    return f"check the path and the disk; {_NOT_A_MODEL}"
