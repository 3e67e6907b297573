"""Ranks of one machine exchange by shared memory: every byte arrives, whatever the sizes, and a lost rank is seen."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from thermocline.errors import GroupLostError
from thermocline.parallel import local_group
from thermocline.parallel.local_group import LocalGroup, are_on_one_machine

TIMEOUT_S = 5.0


class DictStore:
    """A store whose `get` waits."""

    def __init__(self, patience_s: float = TIMEOUT_S) -> None:
        self._patience_s = patience_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._patience_s):
                raise RuntimeError("nobody wrote it")
            return self._values[key]


def on_all(groups, action) -> list:
    """Return what each group's rank returns, each on a thread of its own."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(action, groups))


@pytest.fixture
def groups_of():
    """Return what connects ranks, which leave at the end."""
    made: list[LocalGroup] = []

    def connect(size: int, timeout_s: float = TIMEOUT_S) -> list[LocalGroup]:
        store = DictStore()
        places = range(size)
        made.extend(on_all(places, lambda place: LocalGroup(store, place, size, timeout_s)))
        return made[-size:]

    yield connect
    for group in made:
        group.close()


def run_of(number: int, source: int, target: int, length: int) -> np.ndarray:
    """Return the bytes that one rank gives another in an exchange."""
    return np.random.default_rng([number, source, target]).integers(0, 256, length, np.uint8)


LENGTHS = (0, 1, 4095, 4096, 4097, 70_001, 3 << 20)


@pytest.mark.parametrize("size", [2, 3])
def test_every_byte_arrives(size, groups_of):
    """Empty runs, those just small enough for the socket, and those that let the outbox grow; one after the other, by
    ranks that wait for nobody else. What does not arrive stays poisoned."""
    lengths = np.random.default_rng(7).choice(LENGTHS, (12, size, size))

    def take_part(group: LocalGroup) -> None:
        for number, table in enumerate(lengths):
            place = group.place
            runs = [run_of(number, place, rank, table[place, rank]) for rank in range(size)]
            expected = [run_of(number, rank, place, table[rank, place]) for rank in range(size)]
            received = np.full(sum(map(len, expected)), 0xA5, np.uint8)
            sizes = group.exchange_sizes(table[place].astype(np.int64))
            assert sizes.tolist() == table[:, place].tolist()
            group.exchange(
                np.concatenate(runs), table[place].tolist(), received, table[:, place].tolist()
            )
            np.testing.assert_array_equal(received, np.concatenate(expected))

    on_all(groups_of(size), take_part)


def test_a_rank_that_is_ahead_overwrites_nothing(groups_of):
    """One reads late in every exchange: the other is at most one ahead, and its memory has two halves."""
    first, second = groups_of(2)
    length = 8192

    def fast() -> None:
        for number in range(8):
            run = np.full(length, number, np.uint8)
            first.exchange(run, [0, length], np.empty(length, np.uint8), [0, length])

    original = second._take
    ahead = threading.Event()

    def late(peer, run) -> None:
        # Nothing more comes of the other before this rank has read: it has had time for it.
        ahead.wait(0.02)
        original(peer, run)

    second._take = late
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(fast)
        for number in range(8):
            received = np.empty(length, np.uint8)
            second.exchange(np.zeros(length, np.uint8), [length, 0], received, [length, 0])
            assert received.tolist() == [number] * length
        done.result(TIMEOUT_S)


def test_a_message_between_two_exchanges_frees_nothing(groups_of):
    """Nobody answers a broadcast: behind it, what the exchange before gave may still be read."""
    first, second = groups_of(2)
    length = 8192
    original, never = second._take, threading.Event()

    def fast() -> None:
        for number in range(6):
            run = np.full(length, number, np.uint8)
            first.exchange(run, [0, length], np.empty(length, np.uint8), [0, length])
            first.broadcast(b"next")

    def late(peer, run) -> None:
        never.wait(0.02)  # time enough for who does not wait for this rank
        original(peer, run)

    def slow() -> None:
        second._take = late
        for number in range(6):
            received = np.empty(length, np.uint8)
            run = np.zeros(length, np.uint8)
            second.exchange(run, [length, 0], received, [length, 0])
            assert set(received.tolist()) == {number}
            assert second.broadcast(None) == b"next"

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(fast), pool.submit(slow)]:
            each.result()


@pytest.mark.parametrize("length", [0, 10, 300_000])
def test_a_broadcast_arrives_whole(length, groups_of):
    """Also when it is larger than a socket's buffer, and when another follows."""
    data = run_of(0, 0, 0, length).tobytes()

    def take_part(group: LocalGroup) -> list[bytes]:
        return [group.broadcast(data if group.place == 0 else None) for _ in range(3)]

    assert on_all(groups_of(3), take_part) == [[data] * 3] * 3


def test_a_rank_that_leaves_is_seen_at_once(groups_of):
    """Long before the timeout, and by who waits already."""
    first, second, third = groups_of(3)
    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(each.exchange_sizes, np.zeros(3, np.int64)) for each in (first, third)]
        second.close()
        for each in waits:
            with pytest.raises(GroupLostError):
                each.result(TIMEOUT_S)
    assert time.monotonic() - start_s < TIMEOUT_S / 2


def test_closing_ends_the_own_wait(groups_of):
    """A rank gives the group up while its lane is inside an exchange."""
    first, _ = groups_of(2)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(first.exchange_sizes, np.zeros(2, np.int64))
        first.close()
        with pytest.raises(GroupLostError):
            wait.result(TIMEOUT_S / 2)


def test_a_late_rank_is_lost_after_the_timeout(groups_of):
    """One that is stopped says nothing, and its sockets stay open."""
    first, _ = groups_of(2, 0.2)
    with pytest.raises(GroupLostError, match="later than --rank-timeout"):
        first.exchange_sizes(np.zeros(2, np.int64))


def test_ranks_that_disagree_on_a_length_end(groups_of):
    """Instead of reading each other's next exchange."""
    first, second = groups_of(2)

    def take_part(group: LocalGroup) -> None:
        length = 10 + group.place
        with pytest.raises(GroupLostError):
            group.exchange(
                np.zeros(length, np.uint8),
                [length, 0] if group.place else [0, length],
                np.zeros(length, np.uint8),
                [length, 0] if group.place else [0, length],
            )

    on_all([first, second], take_part)


def test_a_stranger_is_not_taken_for_a_rank():
    """Who has not read the token in the store is refused, and the ranks still meet."""
    store = DictStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(LocalGroup, store, 0, 2, TIMEOUT_S)
        name = bytes.fromhex(store.get("link/0").decode().split()[0])
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(name)
            stranger.sendall(bytes(16) + (1).to_bytes(4, "little"))
            second = LocalGroup(store, 1, 2, TIMEOUT_S)
            assert stranger.recv(1) == b""
        groups = [first.result(), second]
    found = on_all(groups, lambda group: group.exchange_sizes(np.array([5, 6])).tolist())
    assert found == [[5, 5], [6, 6]]
    for group in groups:
        group.close()


def test_another_user_is_refused_before_anything_is_read(monkeypatch):
    """Else one that connects and says nothing could keep ranks from meeting."""
    users = iter([os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(local_group, "_user_of", lambda link: next(users))
    store = DictStore()
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as stranger:
        first = pool.submit(LocalGroup, store, 0, 2, TIMEOUT_S)
        stranger.connect(bytes.fromhex(store.get("link/0").decode().split()[0]))
        assert stranger.recv(1) == b""
        groups = [LocalGroup(store, 1, 2, TIMEOUT_S), first.result()]
    monkeypatch.undo()
    mine, other = socket.socketpair()
    with mine, other:
        assert local_group._user_of(mine) == os.getuid()
    for group in groups:
        group.close()


def test_a_rank_that_never_comes_is_lost():
    """Whether the one that waits connects or listens."""
    for place in (0, 1):
        with pytest.raises(GroupLostError):
            LocalGroup(DictStore(0.1), place, 2, 0.1)


def test_machines_are_told_apart(monkeypatch):
    """All ranks find the same; another boot, user or network is another machine, and so is one that can not tell."""
    store = DictStore()
    assert on_all([0, 1], lambda place: are_on_one_machine(store, place, 2)) == [True, True]

    def nowhere() -> str:
        raise OSError("no /proc")

    for name in (lambda: "elsewhere", nowhere):
        store = DictStore()
        assert isinstance(local_group.machine_name(), str)
        store.set("machine/0", local_group.machine_name())
        with monkeypatch.context() as patch:
            patch.setattr(local_group, "machine_name", name)
            assert not are_on_one_machine(store, 1, 2)
        assert not are_on_one_machine(store, 0, 2)
    with pytest.raises(GroupLostError):
        are_on_one_machine(DictStore(0.1), 0, 2)
