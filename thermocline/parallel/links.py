"""A socket between every two ranks of a group: how they find each other and who may come. Knows no exchange."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from thermocline.errors import GroupLostError

if TYPE_CHECKING:
    from collections.abc import Callable

_CREDENTIALS: Final = struct.Struct("iII")  # process, user, group
_TOKEN_BYTES: Final = 16
_HELLO_SHARE: Final = 0.25
"""Of the time for all: a rank says its token right after it has connected, and who says nothing does not use up the time."""


class MeetingStore(Protocol):
    """The part of torch's Store that a group meets by. Both raise RuntimeError when it is gone, `get` also after a timeout."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        ...


class Meeting(Protocol):
    """Where ranks of one kind of network listen."""

    name: str
    """Of the kind; no two kinds share a key of the store."""

    def listen(self) -> tuple[socket.socket, str]:
        """Return a bound socket, and its address as the others read it. Raises OSError."""
        ...

    def link(self, address: str) -> tuple[socket.socket, object]:
        """Return a new socket, and what it is to be connected to."""
        ...

    def is_welcome(self, link: socket.socket) -> bool:
        """Whether something is to be read from who has connected."""
        ...


class LocalMeeting:
    """Abstract Unix sockets, which processes of one network namespace see; only this user's are read from."""

    name = "link"

    def listen(self) -> tuple[socket.socket, str]:
        """See `Meeting`."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0thermocline-{secrets.token_hex(16)}")
        return listener, listener.getsockname().hex()

    def link(self, address: str) -> tuple[socket.socket, object]:
        """See `Meeting`."""
        return socket.socket(socket.AF_UNIX), bytes.fromhex(address)

    def is_welcome(self, link: socket.socket) -> bool:
        """See `Meeting`."""
        return _user_of(link) == os.getuid()


class NetworkMeeting:
    """TCP at one address of this machine, by which the others reach it."""

    name = "wire"

    def __init__(self, address: Callable[[], str]) -> None:
        """address: returns it, or raises OSError."""
        self._address = address

    def listen(self) -> tuple[socket.socket, str]:
        """See `Meeting`."""
        address = self._address()
        listener = _tcp(address)
        try:
            listener.bind((address, 0))
        except OSError:
            listener.close()
            raise
        return listener, f"{address}#{listener.getsockname()[1]}"

    def link(self, address: str) -> tuple[socket.socket, object]:
        """See `Meeting`."""
        host, _, port = address.rpartition("#")
        return _tcp(host), (host, int(port))

    def is_welcome(self, link: socket.socket) -> bool:
        """Anybody may say the token."""
        return True


def connect_all(
    meeting: Meeting,
    store: MeetingStore,
    place: int,
    size: int,
    timeout_s: float,
    keep: Callable[[int, socket.socket], None],
) -> None:
    """Connect to the ranks before this one and accept those behind it; a token in the store says who may come.

    keep: takes each link as it is made, also where others fail. Raises OSError, RuntimeError of the store, and TimeoutError.
    """
    end_s = time.monotonic() + timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    key = meeting.name
    try:
        listener, address = meeting.listen()
    except OSError:
        store.set(f"{key}/{place}", "")  # the others need not wait
        raise
    with listener:
        listener.listen(size)
        store.set(f"{key}/{place}", f"{address} {token.hex()}")
        for rank in range(place):
            there = store.get(f"{key}/{rank}").decode().split()
            if not there:
                raise OSError(f"rank {rank} can not listen")
            link, where = meeting.link(there[0])
            keep(rank, link)
            link.settimeout(_left(end_s))
            link.connect(where)  # type: ignore[arg-type]
            link.sendall(bytes.fromhex(there[1]) + struct.pack("<I", place))
        missing = set(range(place + 1, size))
        while missing:
            listener.settimeout(_left(end_s))
            link, _ = listener.accept()
            if not meeting.is_welcome(link):
                link.close()  # before anything is waited for
                continue
            link.settimeout(min(_left(end_s), _HELLO_SHARE * timeout_s))
            hello = bytearray(_TOKEN_BYTES + 4)
            rank = -1
            with suppress(EOFError, ConnectionError, TimeoutError):
                fill(link, memoryview(hello))
                rank = int.from_bytes(hello[_TOKEN_BYTES:], "little")
            if secrets.compare_digest(bytes(hello[:_TOKEN_BYTES]), token) and rank in missing:
                missing.remove(rank)
                keep(rank, link)
            else:
                link.close()


def own_address(master: str, interface: str | None) -> str:
    """Return the address by which other ranks reach this machine. Raises OSError.

    master: where the ranks meet. interface: the network interface that gloo is told to use; None for the one that the master
    is reached by.
    """
    if interface is not None:
        return _address_of(interface)
    family, _, _, _, there = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if none has."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if _address_of(name) == address:
                return name
    return None


def fill(link: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises EOFError when the other end is closed, TimeoutError after the link's timeout."""
    while into:
        count = link.recv_into(into)
        if not count:
            raise EOFError("a rank has left")
        into = into[count:]


def lost(error: Exception) -> GroupLostError:
    """Return the error of an exchange that failed."""
    text = str(error).splitlines()[0] if str(error) else repr(error)
    return GroupLostError(f"a rank was lost, or is later than --rank-timeout: {text}")


def _user_of(link: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(
        link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


def _tcp(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    link = socket.socket(family, socket.SOCK_STREAM)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


_SIOCGIFADDR: Final = 0x8915
_INTERFACE: Final = struct.Struct("16s24x")


def _address_of(interface: str) -> str:
    """Return an interface's IPv4 address. Raises OSError."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe, _SIOCGIFADDR, _INTERFACE.pack(interface.encode()[:15]))
    return socket.inet_ntoa(found[20:24])


def _left(end_s: float) -> float:
    """Return the seconds until `end_s`. Raises TimeoutError when it is over."""
    seconds = end_s - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("a rank did not come")
    return seconds
