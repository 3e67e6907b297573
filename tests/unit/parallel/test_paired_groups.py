"""Ranks exchange by shared memory, and by sockets: every byte arrives, whatever the sizes, and a lost rank is seen."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from tests.support.paired_groups import KINDS, TIMEOUT_S, DictStore, on_all, one_group, run_of
from thermocline.errors import GroupLostError
from thermocline.parallel import links
from thermocline.parallel.links import LocalMeeting, NetworkMeeting, connect_all

LENGTHS = (0, 1, 4095, 4096, 4097, 70_001, 3 << 20)


@pytest.fixture(params=KINDS)
def groups_of(request):
    """Return what connects ranks, which leave at the end."""
    made = []

    def connect(size: int, timeout_s: float = TIMEOUT_S) -> list:
        store = DictStore()
        one = partial(one_group, request.param, store)
        made.extend(on_all(range(size), lambda place: one(place, size, timeout_s)))
        return made[-size:]

    yield connect
    for group in made:
        group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_every_byte_arrives(size, groups_of):
    """Empty runs, those just small enough for a socket's buffer, and far larger ones; one after the other, by ranks that
    wait for nobody else, small and large exchanges in turns. What does not arrive stays poisoned."""
    lengths = np.random.default_rng(7).choice(LENGTHS, (12, size, size))

    def take_part(group) -> None:
        for number, table in enumerate(lengths):
            place = group.place
            runs = [run_of(number, place, rank, table[place, rank]) for rank in range(size)]
            expected = [run_of(number, rank, place, table[rank, place]) for rank in range(size)]
            received = np.full(sum(map(len, expected)), 0xA5, np.uint8)
            sizes = group.exchange_sizes(table[place].astype(np.int64))
            assert sizes.tolist() == table[:, place].tolist()
            group.exchange(
                *(np.concatenate(runs), table[place].tolist()),
                *(received, table[:, place].tolist()),
                is_small=number % 4 != 3,
            )
            np.testing.assert_array_equal(received, np.concatenate(expected))

    on_all(groups_of(size), take_part)


@pytest.mark.parametrize("length", [0, 10, 300_000])
def test_a_broadcast_arrives_whole(length, groups_of):
    """Also when it is larger than a socket's buffer, and when another follows."""
    data = run_of(0, 0, 0, length).tobytes()

    def take_part(group) -> list[bytes]:
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


def test_a_rank_that_leaves_while_others_write_to_it_is_seen(groups_of):
    """More than the buffers hold, and nobody reads."""
    first, second = groups_of(2)
    length = 16 << 20
    run, found = np.zeros(length, np.uint8), np.empty(0, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(first.exchange, run, [0, length], found, [0, 0], is_small=True)
        second.close()
        with pytest.raises(GroupLostError):
            wait.result(TIMEOUT_S / 2)


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


@pytest.mark.parametrize("lengths", [(10, 11), (0, 11), (11, 0)])
def test_ranks_that_disagree_on_a_length_end(lengths, groups_of):
    """Instead of reading each other's next exchange."""
    first, second = groups_of(2, 1.0)

    def take_part(group) -> None:
        other = 1 - group.place
        counts = [0, 0]
        counts[other] = lengths[group.place]
        with pytest.raises(GroupLostError):
            group.exchange(
                *(np.zeros(sum(counts), np.uint8), counts) * 2,
                is_small=True,
            )
        group.close()

    on_all([first, second], take_part)


def shown(meeting, store) -> tuple[socket.socket, object]:
    """Return a socket for rank 0 of the store, and where it listens."""
    address = store.get(f"{meeting.name}/0").decode().split()[0]
    return meeting.link(address)


@pytest.mark.parametrize(
    "meeting",
    [LocalMeeting(), NetworkMeeting(lambda: "127.0.0.1"), NetworkMeeting(lambda: "::1")],
    ids=["unix", "ipv4", "ipv6"],
)
def test_a_stranger_is_not_taken_for_a_rank(meeting):
    """Who has not read the token in the store is refused, also one that leaves or says nothing, and the ranks still meet."""
    if isinstance(meeting, NetworkMeeting):
        try:
            meeting.listen()[0].close()
        except OSError:
            pytest.skip("this machine has no such address")
    store, found = DictStore(), ({}, {})

    def meet(place: int) -> None:
        connect_all(meeting, store, place, 2, TIMEOUT_S, found[place].__setitem__)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, 0)
        silent, where = shown(meeting, store)
        silent.connect(where)
        for hello in (bytes(16) + (1).to_bytes(4, "little"), b"GET / HTTP/1.1\r\n\r\n  ", b""):
            stranger, where = shown(meeting, store)
            with stranger:
                stranger.connect(where)
                stranger.sendall(hello)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        meet(1)
        first.result(TIMEOUT_S)
        silent.close()
    (mine,), (theirs,) = (each.values() for each in found)
    with mine, theirs:
        mine.sendall(b"hello")
        assert theirs.recv(5) == b"hello"


def test_another_user_is_refused_before_anything_is_read(monkeypatch):
    """Else one that connects and says nothing could keep ranks from meeting."""
    users = iter([os.getuid() + 1, os.getuid()])
    monkeypatch.setattr(links, "_user_of", lambda link: next(users))
    store, found = DictStore(), ({}, {})

    def meet(place: int) -> None:
        connect_all(LocalMeeting(), store, place, 2, TIMEOUT_S, found[place].__setitem__)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, 0)
        stranger, where = shown(LocalMeeting(), store)
        with stranger:
            stranger.connect(where)
            assert stranger.recv(1) == b""
        meet(1)
        first.result(TIMEOUT_S)
    monkeypatch.undo()
    mine, other = socket.socketpair()
    with mine, other:
        assert links._user_of(mine) == os.getuid()
    for each in (*found[0].values(), *found[1].values()):
        each.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_comes_is_lost(kind):
    """Whether the one that waits connects or listens."""
    for place in (0, 1):
        with pytest.raises(GroupLostError):
            one_group(kind, DictStore(0.1), place, 2, 0.1)
