"""The cache: blocks have one holder at a time, and the pool keeps what was written where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.errors import ConfigError
from thermocline.kv.blocks import BlockAllocator
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_random_use_never_loses_or_shares_a_block(actions):
    """Allocations are disjoint; what is given back can be taken again; the count always fits."""
    allocator, held = BlockAllocator(10, 16), []
    for take, amount in actions:
        if take:
            before = allocator.num_free
            blocks = allocator.allocate(amount)
            if amount > before:
                assert blocks is None
                assert allocator.num_free == before, "a refused request takes nothing"
            else:
                held.append(blocks)
        elif held:
            allocator.release(held.pop(amount % len(held)))
        taken = [block for blocks in held for block in blocks]
        assert len(taken) == len(set(taken)) == 10 - allocator.num_free
        allocator.check_integrity()


def test_giving_back_twice_is_our_bug():
    """A double release is caught where it happens."""
    allocator = BlockAllocator(4, 16)
    blocks = allocator.allocate(2)
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="not all taken"):
        allocator.release(blocks)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens, blocks):
    """A part of a block is a whole block."""
    assert BlockAllocator(4, 16).blocks_for(tokens) == blocks


def test_the_pool_keeps_layers_and_slots_apart():
    """Keys and values are found where they were written, in that layer alone."""
    rng = np.random.default_rng(1)
    pool = KVPool(num_layers=2, num_blocks=3, block_tokens=4, kv_heads=2, head_dim=8)
    keys, values = (rng.standard_normal((3, 2, 8)).astype(np.float32) for _ in range(2))
    slots = np.array([1, 11, 6], np.int32)
    pool.write(LayerIndex(1), slots, keys, values)
    table = np.array([2, 0], np.int32)
    view = pool.view(LayerIndex(1), table)
    np.testing.assert_array_equal(view.keys[slots], keys)
    np.testing.assert_array_equal(view.values[slots], values)
    assert view.block_table is table
    assert not pool.view(LayerIndex(0), table).keys.any()


def test_a_large_pool_costs_no_memory_until_it_is_used():
    """32 GiB of address space can be reserved on a small machine."""
    pool = KVPool(num_layers=8, num_blocks=1 << 16, block_tokens=16, kv_heads=4, head_dim=128)
    assert pool.reserved_bytes == 2 * 8 * (1 << 20) * 4 * 128 * 4


def test_an_impossible_pool_is_a_typed_error():
    """What the system can not even reserve says which flag to turn."""
    with pytest.raises(ConfigError, match="--ctx"):
        KVPool(num_layers=1, num_blocks=1 << 50, block_tokens=16, kv_heads=4, head_dim=128)
