"""How ranks meet: at the start, again after a loss, and who is not waited for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.support.thread_ranks import ThreadWorld
from thermocline.errors import MeshEndedError, MeshError
from thermocline.parallel.rendezvous import Rendezvous

TIMEOUT_S = 1.0


@pytest.fixture
def meet():
    """Return what makes ranks, which end with the test."""
    with ExitStack() as stack:

        def make(count: int, world: ThreadWorld | None = None) -> list[Rendezvous]:
            world = world or ThreadWorld(TIMEOUT_S)
            ranks = [Rendezvous(world.store(rank), rank, TIMEOUT_S) for rank in range(count)]
            for rank in ranks:
                stack.callback(rank.close)
            return ranks

        yield make


def together(*calls):
    """Return what each call returns or raises, made on a thread of its own."""

    def outcome(call):
        try:
            return call()
        except MeshError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def test_ranks_with_the_same_facts_meet(meet):
    """Nobody returns before all are there."""
    ranks = meet(3)
    facts = {"model file": "a"}
    assert together(*(lambda r=r: r.first(3, facts, 10.0) for r in ranks)) == [None] * 3


def test_a_rank_with_another_file_is_named_to_all(meet):
    """Every rank raises the same error, which says what differs."""
    ranks = meet(3)
    files = ("a", "a", "b")
    found = together(
        *(
            lambda r=r, file=file: r.first(3, {"model file": file}, 10.0)
            for r, file in zip(ranks, files, strict=True)
        )
    )
    for error in found:
        assert "rank 2 has another model file than rank 0 (b, not a)" in str(error)


def test_a_rank_that_never_comes_is_named_and_a_late_one_is_refused(meet):
    """All wait no longer than they were told to; who comes after that does not join."""
    ranks = meet(3)
    early = together(*(lambda r=r: r.first(3, {}, 0.3) for r in ranks[:2]))
    assert "rank 2 did not open the model within" in str(early[0])
    late = together(lambda: ranks[2].first(3, {}, 0.3))[0]
    assert isinstance(late, MeshEndedError)
    assert "start all ranks together" in str(late)


def test_ranks_without_a_pulse_are_not_waited_for(meet):
    """Those that are left agree on who goes on, long before twice the timeout; the lost one is told when it wakes."""
    ranks = meet(4)
    ranks[2].close()  # its pulse ends, as that of a stopped process
    start_s = time.monotonic()
    left = together(*(lambda r=r: r.again(1, range(4)) for r in ranks if r is not ranks[2]))
    assert left == [(0, 1, 3)] * 3
    assert time.monotonic() - start_s < 2 * TIMEOUT_S
    woken = together(lambda: ranks[2].again(1, range(4)))[0]
    assert isinstance(woken, MeshEndedError)
    assert "went on without rank 2" in str(woken)


def test_the_end_of_rank_0_is_seen_by_its_pulse_and_by_its_store(meet):
    """Stopped or gone: the others say that the service has ended."""
    ranks = meet(2)
    ranks[0].close()
    assert "rank 0 has ended" in str(together(lambda: ranks[1].again(1, range(2)))[0])
    world = ThreadWorld(TIMEOUT_S)
    ranks = meet(2, world)
    world.dead.add(0)
    assert "rank 0 has ended" in str(together(lambda: ranks[1].again(1, range(2)))[0])
