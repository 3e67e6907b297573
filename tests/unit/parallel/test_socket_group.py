"""Sockets are used where every rank has them and they are faster; else ranks go on without, and say why."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from tests.support.paired_groups import TIMEOUT_S, DictStore, on_all
from thermocline.errors import GroupLostError
from thermocline.parallel.links import interface_of, own_address
from thermocline.parallel.local_group import LocalGroup
from thermocline.parallel.socket_group import SocketGroup, with_sockets


class SlowGroup(LocalGroup):
    """Takes longer for an exchange."""

    delay_s = 0.0
    num_exchanges = 0

    def exchange(self, *given, is_small=False):
        self.num_exchanges += 1
        time.sleep(self.delay_s)
        super().exchange(*given, is_small=is_small)


def slow(delay_s: float):
    """Return groups of so long an exchange."""
    return type("Slow", (SlowGroup,), {"delay_s": delay_s})


@pytest.fixture
def connected():
    """Return what connects ranks, which leave at the end. addresses: by rank."""
    made = []

    def connect(kind: type[LocalGroup], addresses, timeout_s: float = TIMEOUT_S) -> list:
        store, size = DictStore(), len(addresses)

        def one(place: int):
            whole = kind(store, place, size, timeout_s)
            made.append(whole)
            return with_sockets(whole, store, timeout_s, addresses[place])

        groups = on_all(range(size), one)
        made.extend(groups)
        return groups

    yield connect
    for group in made:
        group.close()


def here() -> str:
    """Return the address of all ranks of a test."""
    return "127.0.0.1"


def nowhere() -> str:
    """Fail as where an interface is missing."""
    raise OSError("no such device")


def elsewhere() -> str:
    """Return an address that is not this machine's."""
    return "192.0.2.1"


@pytest.mark.parametrize("size", [2, 3])
def test_the_faster_way_is_taken_for_small_exchanges(size, connected):
    """And the other one for all others; the way says what was measured."""
    groups = connected(slow(0.003), [here] * size)
    assert all(isinstance(group, SocketGroup) for group in groups)
    assert all("by sockets where few tokens travel (" in group.way for group in groups)
    before = [group._whole.num_exchanges for group in groups]
    expected = [[place] * size for place in range(size)]

    def sizes(group) -> list[int]:
        return group.exchange_sizes(np.arange(size)).tolist()

    assert on_all(groups, sizes) == expected
    assert [group._whole.num_exchanges for group in groups] == before

    def large(group) -> None:
        run = np.zeros(size, np.uint8)
        group.exchange(run, [1] * size, run.copy(), [1] * size)

    on_all(groups, large)
    assert [group._whole.num_exchanges for group in groups] == [count + 1 for count in before]


def test_all_ranks_go_by_what_place_0_measured(connected, monkeypatch):
    """Each measures other times; they agree all the same, also where sockets are slower."""
    times = {0: [9.0, 4.0], 1: [4.0, 9.0]}
    monkeypatch.setattr(
        "thermocline.parallel.socket_group._times_us", lambda groups: times[groups[0].place]
    )
    groups = connected(LocalGroup, [here, here])
    assert not any(isinstance(group, SocketGroup) for group in groups)
    assert "small exchanges by sockets take 9 us, not 4" in groups[0].way
    times.update({0: [4.0, 9.0], 1: [9.0, 4.0]})
    groups = connected(LocalGroup, [here, here])
    assert all(isinstance(group, SocketGroup) for group in groups)


@pytest.mark.parametrize("lacks", [nowhere, elsewhere])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_without_a_socket_of_one_rank_all_do_without(rank, lacks, connected, caplog):
    """Nobody waits for it to the deadline, the way names it, and it says why."""
    addresses = [here, here, here]
    addresses[rank] = lacks
    start_s = time.monotonic()
    groups = connected(LocalGroup, addresses, timeout_s=2.0)
    assert time.monotonic() - start_s < 2.0
    assert not any(isinstance(group, SocketGroup) for group in groups)
    assert all("has no socket to each other one" in group.way for group in groups)
    assert "no sockets between ranks: " in caplog.text
    assert lacks is not nowhere or "no such device" in caplog.text
    found = on_all(groups, lambda group: group.exchange_sizes(np.arange(3)).tolist())
    assert found == [[place] * 3 for place in range(3)]


def test_a_rank_that_is_lost_meanwhile_is_told(connected):
    """It is the loss of a rank, not of the sockets."""

    class Lost(LocalGroup):
        def exchange_sizes(self, sizes):
            raise GroupLostError("killed")

    with pytest.raises(GroupLostError):
        connected(Lost, [here, here])


def test_a_machines_own_address():
    """The one by which the master is reached, or that of the interface which is named."""
    assert own_address("127.0.0.1", None) == "127.0.0.1"
    assert own_address("localhost", "lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    with pytest.raises(OSError, match="No such device"):
        own_address("127.0.0.1", "no such one")
    with pytest.raises(socket.gaierror):
        own_address("no-such-host.invalid", None)
