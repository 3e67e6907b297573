"""The join: a layer is released when its last part arrives, in whatever order the parts come."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.support.chunks import make_chunk, make_work, partial_sum
from thermocline.messages import ChunkId, Tier
from thermocline.pipeline.join import Join


def parts_of(chunk_id: int = 0):
    work = make_work(make_chunk(chunk_id), [[0, 1], [1, 2], [2, 0]], hot={0})
    return work, partial_sum(work, Tier.HOT), partial_sum(work, Tier.COLD)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_any_order_of_arrival_completes_once(order):
    """Only the last of the three parts releases the layer, and nothing is kept."""
    join, parts = Join(), parts_of()
    results = [join.add(parts[index]) for index in order]
    assert results[:2] == [None, None]
    assert results[2] is not None
    assert results[2].work is parts[0]
    assert {partial.tier for partial in results[2].results} == {Tier.HOT, Tier.COLD}
    assert len(join) == 0


def test_work_for_one_tier_waits_for_that_tier_alone():
    """All-cold work needs no hot part."""
    work = make_work(make_chunk(), [[1, 2]], hot=set())
    join = Join()
    assert join.add(work) is None
    assert join.add(partial_sum(work, Tier.COLD)) is not None


def test_chunks_do_not_mix():
    """Parts of two chunks are matched by chunk."""
    join, first, second = Join(), parts_of(0), parts_of(1)
    for part in (first[0], second[0], first[1], second[2]):
        assert join.add(part) is None
    released = join.add(first[2])
    assert released is not None
    assert released.work.chunk.id == 0


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
