"""Memory that ranks share is not overwritten too early, and who shares it. The rest: test_paired_groups.py."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.paired_groups import TIMEOUT_S, DictStore, on_all
from thermocline.errors import GroupLostError
from thermocline.parallel import local_group
from thermocline.parallel.local_group import LocalGroup, are_on_one_machine


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
