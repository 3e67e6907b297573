"""The group whose small exchanges go by a TCP socket between every two ranks, and all others by another group.

A collective between machines makes several messages of a few bytes; a step of few tokens needs two such exchanges in each
layer. Here a rank writes to each other one and reads from each, at once. Whether that is faster is measured when the
group forms. Used by one thread at a time.
"""

from __future__ import annotations

import logging
import select
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import GroupLostError
from thermocline.parallel.links import NetworkMeeting, connect_all, lost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from thermocline.parallel.group import Group
    from thermocline.parallel.links import MeetingStore

    Bytes = NDArray[np.uint8]

_LOG: Final = logging.getLogger("thermocline.parallel")
_HEAD: Final = struct.Struct("<QQ")
"""The number of the exchange, and the bytes that follow."""
_NUM_TRIALS: Final = 15


class SocketGroup:
    """A `Group` of ranks that have a socket to each other one."""

    def __init__(self, whole: Group, links: Mapping[int, socket.socket], timeout_s: float) -> None:
        """whole: of the same ranks, for what is not small. links: by place of the other."""
        self.place, self.size = whole.place, whole.size
        self.way = f"by sockets where few tokens travel, else {whole.way}"
        self._whole, self._links, self._timeout_s = whole, links, timeout_s
        self._number = 0
        """Of small exchanges: ranks that are not at the same one have lost each other."""
        self._in_use = threading.Lock()
        """Held by who reads and writes: no socket is closed under it, since its number may be another's at once."""
        self._is_closed = False
        for link in links.values():
            link.setblocking(False)

    def __repr__(self) -> str:
        return f"SocketGroup({self.place} of {self.size}, {self._number} exchanges)"

    def exchange_sizes(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Group`."""
        found = np.empty_like(sizes)
        lengths = [sizes.itemsize] * self.size
        given = sizes.view(np.uint8)
        self.exchange(given, lengths, found.view(np.uint8), lengths, is_small=True)
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
        """See `Group`."""
        if not is_small:
            self._whole.exchange(send, sent, receive, received)
            return
        self._number += 1
        ends, starts = np.cumsum(sent).tolist(), np.cumsum([0, *received]).tolist()
        runs = {rank: send[ends[rank] - sent[rank] : ends[rank]] for rank in range(self.size)}
        receive[starts[self.place] : starts[self.place + 1]] = runs.pop(self.place)
        given = {
            rank: _HEAD.pack(self._number, len(run)) + run.tobytes() for rank, run in runs.items()
        }
        found = self._swap(given, {rank: received[rank] for rank in runs})
        for rank, data in found.items():
            receive[starts[rank] : starts[rank + 1]] = np.frombuffer(data, np.uint8, -1, _HEAD.size)

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Group`."""
        return self._whole.broadcast(data)

    def close(self) -> None:
        """See `Group`; a rank that waits for this one sees it at once."""
        self._is_closed = True
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # ends the wait of who uses it
        with self._in_use:
            for link in self._links.values():
                link.close()
        self._whole.close()

    def _swap(self, given: Mapping[int, bytes], lengths: Mapping[int, int]) -> dict[int, bytearray]:
        """Give each other rank a message and return each one's. Raises GroupLostError.

        lengths: of what follows the heads that come. Messages may be larger than the sockets' buffers: who only wrote would
        wait for one that only writes.
        """
        found = {rank: bytearray(_HEAD.size + length) for rank, length in lengths.items()}
        left = {rank: memoryview(data) for rank, data in found.items()}
        unsent = {rank: memoryview(data) for rank, data in given.items()}
        end_s = time.monotonic() + self._timeout_s
        try:
            with self._in_use:
                self._write(unsent, [*unsent])
                while unsent or left:
                    ready = self._ready(unsent, left, end_s - time.monotonic())
                    self._write(unsent, [rank for rank in ready if rank in unsent])
                    for rank in ready:
                        if rank in left:
                            self._read(rank, found[rank], left)
        except (OSError, EOFError) as error:
            raise lost(error) from error
        return found

    def _ready(
        self, unsent: Mapping[int, memoryview], left: Mapping[int, memoryview], timeout_s: float
    ) -> list[int]:
        """Return the ranks to which something can be written, or of which something has come."""
        if self._is_closed:
            raise EOFError("this rank has left")
        poll = select.poll()
        ranks = {}
        for rank in unsent.keys() | left.keys():
            link = self._links[rank]
            ranks[link.fileno()] = rank
            wanted = (select.POLLOUT if rank in unsent else 0) | (
                select.POLLIN if rank in left else 0
            )
            poll.register(link, wanted)
        events = poll.poll(max(timeout_s, 0.0) * 1e3)
        if not events:
            raise TimeoutError(f"nothing came of rank {min(ranks.values())} of the group")
        return [ranks[number] for number, _ in events]

    def _write(self, unsent: dict[int, memoryview], ready: Sequence[int]) -> None:
        for rank in ready:
            with suppress(BlockingIOError):
                unsent[rank] = unsent[rank][self._links[rank].send(unsent[rank]) :]
            if not unsent[rank]:
                del unsent[rank]

    def _read(self, rank: int, whole: bytearray, left: dict[int, memoryview]) -> None:
        """Read what has come of a rank. Raises EOFError, and OSError where it is at another exchange."""
        try:
            count = self._links[rank].recv_into(left[rank])
        except BlockingIOError:
            return
        if not count:
            raise EOFError("a rank has left")
        before = len(whole) - len(left[rank])
        left[rank] = left[rank][count:]
        if before < _HEAD.size <= before + count:
            number, length = _HEAD.unpack_from(whole)
            if (number, length) != (self._number, len(whole) - _HEAD.size):
                raise OSError(
                    f"a rank sent {length} bytes in exchange {number}, not {len(whole) - _HEAD.size} in {self._number}"
                )
        if not left[rank]:
            del left[rank]


def with_sockets(
    whole: Group, store: MeetingStore, timeout_s: float, address: Callable[[], str]
) -> Group:
    """Return a group by sockets where all ranks can connect and small exchanges are faster by them; else `whole`.

    address: returns that of this machine. Raises GroupLostError where a rank is lost meanwhile.
    """
    links: dict[int, socket.socket] = {}
    try:
        # Half of the deadline: the others wait for one that can not connect.
        connect_all(
            *(NetworkMeeting(address), store, whole.place, whole.size, timeout_s / 2),
            links.__setitem__,
        )
        is_here = True
    except (OSError, RuntimeError) as error:
        _LOG.warning("no sockets between ranks: %s; all goes %s", error, whole.way)
        is_here = False
    group = SocketGroup(whole, links, timeout_s)
    try:
        here = whole.exchange_sizes(np.full(whole.size, is_here, np.int64))
        if here.all():
            times_us = _times_us([group, whole])
            mine = bytes([times_us[0] < times_us[1]])
            (is_faster,) = whole.broadcast(mine if whole.place == 0 else None)
            found = f"{times_us[0]:.0f} us, and {times_us[1]:.0f} {whole.way}"
            group.way = f"by sockets where few tokens travel ({found}), else {whole.way}"
            whole.way += (
                f" (small exchanges by sockets take {times_us[0]:.0f} us, not {times_us[1]:.0f})"
            )
        else:
            is_faster = False
            whole.way += (
                f" (rank {int(np.argmin(here))} of the group has no socket to each other one)"
            )
    except GroupLostError:
        group.close()
        raise
    if is_faster:
        return group
    for link in links.values():
        link.close()
    return whole


def _times_us(groups: Sequence[Group]) -> list[float]:
    """Return how long a small exchange takes in each group, measured in turns."""
    times: list[list[float]] = [[] for _ in groups]
    sizes = np.zeros(groups[0].size, np.int64)
    for _ in range(_NUM_TRIALS):
        for found, group in zip(times, groups, strict=True):
            begin_s = time.perf_counter()
            group.exchange_sizes(sizes)
            found.append(1e6 * (time.perf_counter() - begin_s))
    return [statistics.median(each) for each in times]
