"""Blocks are free, held by a counted number of holders, or idle; none is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.kv.blocks import BlockAllocator


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asrf"), st.integers(0, 9)), max_size=60))
def test_random_use_never_loses_a_block(actions):
    """Allocate, share, release and free in any order: counts are right and no block is given twice."""
    allocator, holders = BlockAllocator(6, 16), {}
    for action, choice in actions:
        held = [block for block, count in holders.items() if count]
        idle = [block for block, count in holders.items() if not count]
        if action == "a":
            block = allocator.allocate()
            assert (block is None) == (len(holders) == 6)
            assert block not in holders
            if block is not None:
                holders[block] = 1
        elif action == "s" and holders:
            block = list(holders)[choice % len(holders)]
            allocator.share(block)
            holders[block] += 1
        elif action == "r" and held:
            block = held[choice % len(held)]
            holders[block] -= 1
            assert allocator.release(block) == (holders[block] == 0)
        elif action == "f" and idle:
            block = idle[choice % len(idle)]
            allocator.free(block)
            del holders[block]
        assert allocator.num_free == 6 - len(holders)
        assert all(allocator.num_holders(block) == count for block, count in holders.items())
        allocator.check_integrity()


def test_misuse_is_our_bug():
    """Giving back twice, sharing nothing and freeing what is held are caught where they happen."""
    allocator = BlockAllocator(4, 16)
    block = allocator.allocate()
    with pytest.raises(AssertionError, match="not idle"):
        allocator.free(block)
    allocator.release(block)
    with pytest.raises(AssertionError, match="not held"):
        allocator.release(block)
    allocator.free(block)
    with pytest.raises(AssertionError, match="no content"):
        allocator.share(block)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens, blocks):
    """A part of a block is a whole block."""
    assert BlockAllocator(4, 16).blocks_for(tokens) == blocks


def test_an_allocator_says_what_it_is():
    """The name shows in reports of a failure."""
    allocator = BlockAllocator(4, 16)
    allocator.allocate()
    assert repr(allocator) == "BlockAllocator(3 of 4 blocks free)"
