"""The join: a layer is released when its last part arrives, in whatever order the parts come."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.support.chunks import make_chunk, make_work, partial_sum
from thermocline.messages import ChunkId, Tier
from thermocline.pipeline.join import Join


def parts_of(chunk_id: int = 0, request: int = 1):
    work = make_work(make_chunk(chunk_id, request=request), [[0, 1], [1, 2], [2, 0]], hot={0})
    return work, partial_sum(work, Tier.HOT), partial_sum(work, Tier.COLD)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_any_order_of_arrival_completes_once(order):
    """Only the last of the three parts releases the layer, and nothing is kept."""
    join, parts = Join(), parts_of()
    results = [join.add(parts[index]) for index in order]
    assert results[:2] == [(), ()]
    (joined,) = results[2]
    assert joined.work is parts[0]
    assert {partial.tier for partial in joined.results} == {Tier.HOT, Tier.COLD}
    assert len(join) == 0


def test_work_for_one_tier_waits_for_that_tier_alone():
    """All-cold work needs no hot part."""
    work = make_work(make_chunk(), [[1, 2]], hot=set())
    join = Join()
    assert join.add(work) == ()
    assert len(join.add(partial_sum(work, Tier.COLD))) == 1


def test_chunks_do_not_mix():
    """Parts of two chunks are matched by chunk."""
    join, first, second = Join(), parts_of(0), parts_of(1)
    for part in (first[0], second[0], first[1], second[2]):
        assert join.add(part) == ()
    (released,) = join.add(first[2])
    assert released.work.chunk.id == 0


def test_a_request_s_chunks_leave_in_order():
    """A later chunk that is complete first waits, and leaves together with the one before it."""
    join, first, second = Join(), parts_of(0), parts_of(1)
    for part in (first[0], second[0], second[1], second[2], first[2]):
        assert join.add(part) == ()
    assert [joined.work.chunk.id for joined in join.add(first[1])] == [0, 1]
    assert len(join) == 0


def test_chunks_of_different_requests_do_not_wait_for_each_other():
    """Order belongs to a request, never to the ring."""
    join, first, second = Join(), parts_of(0, request=1), parts_of(1, request=2)
    for part in (first[0], second[0], second[1]):
        assert join.add(part) == ()
    assert [joined.work.chunk.id for joined in join.add(second[2])] == [1]


def test_a_failed_chunk_lets_the_next_one_go():
    """Whoever stood behind the failed chunk alone is released by its end."""
    join, first, second = Join(), parts_of(0), parts_of(1)
    for part in (first[0], *second):
        assert join.add(part) == ()
    assert [joined.work.chunk.id for joined in join.discard(ChunkId(0))] == [1]
    assert len(join) == 0


def test_discard_forgets_a_chunk():
    """A failed chunk leaves nothing behind."""
    join, parts = Join(), parts_of(5)
    join.add(parts[0])
    join.add(parts[1])
    join.discard(ChunkId(5))
    assert len(join) == 0


def test_a_part_that_comes_twice_is_our_bug():
    """Two sums of one tier for one layer can not both be right."""
    join, parts = Join(), parts_of()
    join.add(parts[1])
    with pytest.raises(AssertionError, match="twice"):
        join.add(parts[1])
