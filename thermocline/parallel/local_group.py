"""The group of ranks that are all on one machine: bytes in memory that they share, and a socket between every two.

An exchange copies what is sent into the rank's own outbox, tells each peer where by its socket, and copies out of the
peers' outboxes. Small runs go through the sockets themselves. An outbox has two halves: an exchange ends when every peer
has told of it, which each does after it has read all of the one before, so the half of that one is free again. Nobody answers a broadcast, so it frees nothing.

A socket that ends says that its rank was lost, within milliseconds where it was killed. Used by one thread at a time.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.parallel.links import LocalMeeting, connect_all, fill, lost
from thermocline.remote.shared_slots import sealed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thermocline.parallel.links import MeetingStore

    Bytes = NDArray[np.uint8]

_HEAD: Final = struct.Struct("<QQQ")
"""The number of the exchange, the bytes of the run, and where it begins in the sender's outbox."""
_MAX_INLINE: Final = 4096
"""Runs of so many bytes go through the socket: less than its buffer has room for, so that nobody waits to send."""
_MIN_HALF_BYTES: Final = 1 << 20


def machine_name() -> str:
    """Return what ranks that can share memory have in common: the machine's boot, user and network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = Path("/proc/self/ns/net").readlink()  # abstract sockets are its own
    return f"{boot} {os.getuid()} {network}"


def are_on_one_machine(store: MeetingStore, place: int, size: int) -> bool:
    """Tell the others where this rank is, and return whether all are on one machine: the same on every rank.

    Raises GroupLostError where one does not tell.
    """
    try:
        name = machine_name()
    except OSError:  # no Linux, or no /proc
        name = f"unknown {secrets.token_hex(8)}"
    try:
        store.set(f"machine/{place}", name)
        return len({store.get(f"machine/{rank}") for rank in range(size)}) == 1
    except RuntimeError as error:
        raise lost(error) from error


class _Outbox:
    """Memory that this rank writes and others read."""

    def __init__(self, half_bytes: int) -> None:
        self.half_bytes = half_bytes
        self.fd = sealed_memory("thermocline-rank", 2 * half_bytes)
        self.data: Bytes = np.frombuffer(mmap.mmap(self.fd, 2 * half_bytes), np.uint8)

    def close(self) -> None:
        os.close(self.fd)


class _Peer:
    """The socket to another rank, and its outbox as far as it was shown."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.outbox: Bytes = np.empty(0, np.uint8)
        self.has_ours = False
        """Whether it was given this rank's outbox."""


class LocalGroup:
    """A `Group` of ranks of one machine."""

    def __init__(self, store: MeetingStore, place: int, size: int, timeout_s: float) -> None:
        """Wait for all ranks. Raises GroupLostError when one does not come within the timeout."""
        self.place, self.size = place, size
        self.way = "by shared memory"
        self._peers: dict[int, _Peer] = {}
        self._outbox = _Outbox(_MIN_HALF_BYTES)
        self._number = 0
        """Of exchanges and broadcasts: ranks that are not at the same one have lost each other."""
        self._half = 0
        self._is_closed = False
        try:
            connect_all(LocalMeeting(), store, place, size, timeout_s, self._keep)
        except (OSError, RuntimeError) as error:
            self.close()
            raise lost(error) from error
        for peer in self._peers.values():
            peer.link.settimeout(timeout_s)

    def __repr__(self) -> str:
        return f"LocalGroup({self.place} of {self.size}, {self._number} exchanges)"

    def _keep(self, rank: int, link: socket.socket) -> None:
        self._peers[rank] = _Peer(link)

    def exchange_sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Group`."""
        found = np.empty_like(sizes)
        lengths = [sizes.itemsize] * self.size
        self.exchange(sizes.view(np.uint8), lengths, found.view(np.uint8), lengths)
        return found

    def exchange(
        self,
        send: Bytes,
        sent: Sequence[int],
        receive: Bytes,
        received: Sequence[int],
        *,
        is_small: bool = False,
    ) -> None:
        """See `Group`; is_small makes no difference here."""
        self._number += 1
        ends, starts = np.cumsum(sent).tolist(), np.cumsum([0, *received]).tolist()
        try:
            base = self._put(send, sent)
            for rank, peer in self._peers.items():
                begin = ends[rank] - sent[rank]
                self._tell(peer, send[begin : ends[rank]], base + begin)
            mine = send[ends[self.place] - sent[self.place] : ends[self.place]]
            receive[starts[self.place] : starts[self.place + 1]] = mine
            for rank, peer in self._peers.items():
                self._take(peer, receive[starts[rank] : starts[rank + 1]])
        except (OSError, EOFError) as error:
            raise lost(error) from error

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Group`."""
        self._number += 1
        try:
            if data is None:
                link = self._peers[0].link
                _, length, _ = self._head(link)
                found = bytearray(length)
                fill(link, memoryview(found))
                return bytes(found)
            head = _HEAD.pack(self._number, len(data), 0)
            for peer in self._peers.values():
                peer.link.sendall(head + data)
        except (OSError, EOFError) as error:
            raise lost(error) from error
        return data

    def close(self) -> None:
        """See `Group`; a rank that waits for this one sees it at once."""
        if self._is_closed:
            return
        self._is_closed = True
        for peer in self._peers.values():
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_RDWR)
            peer.link.close()
        self._outbox.close()

    def _put(self, send: Bytes, sent: Sequence[int]) -> int:
        """Copy what does not go through sockets into this exchange's half; return where the half begins."""
        self._half = 1 - self._half
        if max(sent) <= _MAX_INLINE:
            return 0
        if len(send) > self._outbox.half_bytes:
            # Peers keep what they have mapped; the new one they get with the next run.
            self._outbox.close()
            self._outbox = _Outbox(1 << (len(send) - 1).bit_length())
            for peer in self._peers.values():
                peer.has_ours = False
        base = self._half * self._outbox.half_bytes
        self._outbox.data[base : base + len(send)] = send
        return base

    def _tell(self, peer: _Peer, run: Bytes, start: int) -> None:
        head = _HEAD.pack(self._number, len(run), start)
        if len(run) <= _MAX_INLINE:
            peer.link.sendall(head + run.tobytes())
        elif peer.has_ours:
            peer.link.sendall(head)
        else:
            socket.send_fds(peer.link, [head], [self._outbox.fd])
            peer.has_ours = True

    def _take(self, peer: _Peer, run: Bytes) -> None:
        number, length, start = self._head(peer.link, peer)
        if number != self._number or length != len(run):
            raise OSError(f"a rank sent {length} bytes in exchange {number}, not {len(run)}")
        if length <= _MAX_INLINE:
            fill(peer.link, run.data)
            return
        if start + length > len(peer.outbox):
            raise OSError("a rank shows bytes outside its memory")
        run[:] = peer.outbox[start : start + length]

    def _head(self, link: socket.socket, peer: _Peer | None = None) -> tuple[int, int, int]:
        """Receive a head, and the peer's outbox where it comes along."""
        head, fds, _, _ = socket.recv_fds(link, _HEAD.size, 1)
        for fd in fds:
            try:
                if peer is not None:
                    peer.outbox = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
            finally:
                os.close(fd)
        if not head:
            raise EOFError("a rank has left")
        whole = bytearray(_HEAD.size)
        whole[: len(head)] = head
        fill(link, memoryview(whole)[len(head) :])
        number, length, start = _HEAD.unpack(whole)
        return number, length, start
