"""Memory shared by parent and worker: equal slots in one anonymous file.

Owns the mapping. The file has no name and goes with the last process that has it open. A slot begins with its
request's number and the bytes that follow, so stale content is never taken for an answer. Knows no socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from typing import Final, Self

from thermocline.errors import RemoteError, WireError
from thermocline.remote.requests import HEAD_BYTES

_SLOT: Final = struct.Struct("<QQ")
# A file that can not shrink: else the peer could end this process with SIGBUS.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_memory(name: str, num_bytes: int) -> int:
    """Return an anonymous file that keeps its size, for the caller to close; pages are allocated on first use. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class SharedSlots:
    """`num_slots` slots of `slot_bytes`, the fixed part of 64 bytes included."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        """Take over `fd`, which is large enough and sealed."""
        self._slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._fd: int | None = fd
        self._map = mmap.mmap(fd, num_slots * slot_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> Self:
        """Return new memory; pages are allocated on first use. Raises RemoteError."""
        try:
            fd = sealed_memory("thermocline-slots", num_slots * slot_bytes)
            try:
                return cls(fd, num_slots, slot_bytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise RemoteError(
                f"no shared memory for a worker ({error}): use a smaller --worker-batch-capacity, or "
                "--worker-transport stream"
            ) from error

    @classmethod
    def attach(cls, fd: int, num_slots: int, slot_bytes: int) -> Self:
        """Return the memory that a peer sent, and own `fd`. Raises WireError for a file that is not safe."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS or os.fstat(fd).st_size != num_slots * slot_bytes:
                raise WireError("the shared memory that came is not sealed, or of another size")
            return cls(fd, num_slots, slot_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise WireError(f"what came is no shared memory ({error})") from error
        except WireError:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """The file, to be passed to the peer."""
        assert self._fd is not None, "shared memory is used after it was closed"
        return self._fd

    def begin(self, slot: int, request: int, num_bytes: int) -> memoryview:
        """Mark a slot as the request's, and return where its `num_bytes` go."""
        start = slot * self._slot_bytes
        _SLOT.pack_into(self._view, start, request, num_bytes)
        start += HEAD_BYTES
        return self._view[start : start + num_bytes]

    def read(self, slot: int, request: int) -> memoryview:
        """Return what the peer put there for the request. Raises WireError for anything else."""
        if slot >= self.num_slots:
            raise WireError(f"slot {slot} of {self.num_slots} does not exist: the peer is broken")
        start = slot * self._slot_bytes
        owner, num_bytes = _SLOT.unpack_from(self._view, start)
        if owner != request or num_bytes > self._slot_bytes - HEAD_BYTES:
            raise WireError(f"slot {slot} does not hold request {request}: the peer is broken")
        start += HEAD_BYTES
        return self._view[start : start + num_bytes]

    def close(self) -> None:
        """Let the memory go, at once or with the last view of it; more calls do nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        with suppress(BufferError):
            self._view.release()
            self._map.close()
