"""Groups of ranks that are threads, with real sockets between every two: by shared memory, or TCP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.parallel.links import NetworkMeeting, connect_all
from thermocline.parallel.local_group import LocalGroup
from thermocline.parallel.socket_group import SocketGroup

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from thermocline.parallel.group import Group

TIMEOUT_S = 5.0
KINDS = ("shared memory", "sockets")


class DictStore:
    """A store whose `get` waits."""

    def __init__(self, patience_s: float = TIMEOUT_S) -> None:
        self._patience_s = patience_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._patience_s):
                raise RuntimeError("nobody wrote it")
            return self._values[key]


def on_all(groups: Iterable[Any], action: Callable[[Any], Any]) -> list[Any]:
    """Return what each group's rank returns, each on a thread of its own."""
    waiting = list(groups)
    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(action, waiting))


def one_group(kind: str, store: DictStore, place: int, size: int, timeout_s: float) -> Group:
    """Return one rank's group, once all have come. With sockets every exchange goes by them that may."""
    group = LocalGroup(store, place, size, timeout_s)
    if kind == "shared memory":
        return group
    links: dict[int, socket.socket] = {}
    meeting = NetworkMeeting(lambda: "127.0.0.1")
    connect_all(meeting, store, place, size, timeout_s, links.__setitem__)
    return SocketGroup(group, links, timeout_s)


def run_of(number: int, source: int, target: int, length: int) -> np.ndarray:
    """Return the bytes that one rank gives another in an exchange."""
    return np.random.default_rng([number, source, target]).integers(0, 256, length, np.uint8)
