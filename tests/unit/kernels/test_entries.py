"""Entries in place of tokens: where they lie, that they do not overlap, and that blocks carry them."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.kernels.cache_format import CacheShape, CacheType, copy_cache
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import LayerCache
from thermocline.kernels.entries import EntryCache, cache_of_rows, entry_shape, places_of

NUM_BLOCKS = 24


def empty(ratio: int, block_tokens: int, dim: int, index: int, kind: CacheType) -> LayerCache:
    """Return a cache of zeros whose tokens keep what `entry_shape` says."""
    heads = entry_shape(ratio, dim, index)
    shape = CacheShape.of(kind, NUM_BLOCKS, block_tokens, heads)
    keys, values, rows = (
        np.zeros(each, np.uint8)
        for each in (shape.array_shape, shape.value_shape, shape.index_shape)
    )
    return LayerCache(shape, keys, values, rows if index else None)


@pytest.mark.parametrize("block_tokens", [16, 32, 48, 128, 256])
@pytest.mark.parametrize(("ratio", "dim", "index"), [(4, 512, 128), (128, 512, 0), (4, 22, 18)])
@pytest.mark.parametrize("kind", [CacheType.F32, CacheType.F16])
def test_an_entry_lies_in_the_block_of_its_last_token(block_tokens, ratio, dim, index, kind):
    """In places of tokens up to that one, which no other entry takes; what is stored comes back."""
    cache = empty(ratio, block_tokens, dim, index, kind)
    entries, rng = EntryCache(cache, ratio), np.random.default_rng(ratio)
    table = rng.permutation(NUM_BLOCKS).astype(np.int32)
    numbers = np.arange(NUM_BLOCKS * block_tokens // ratio, dtype=np.int32)
    slots, last = entries.slots(table, numbers), entries.last_slots(table, numbers)
    places = places_of(ratio)
    assert len(set(slots.tolist())) == len(numbers)
    np.testing.assert_array_equal(slots * places // block_tokens, last // block_tokens)
    assert (slots * places + places - 1 <= last).all()
    given = rng.integers(-9, 9, (len(numbers), dim)).astype(np.float32)
    asked = rng.integers(-9, 9, (len(numbers), index)).astype(np.float32) if index else None
    entries.store(slots, given, asked)
    number = np.float32 if kind is CacheType.F32 else np.float16
    np.testing.assert_array_equal(entries.rows(slots, dim).view(number), given)
    if asked is not None:
        q, ones = rng.standard_normal((3, 2, index)).astype(np.float32), np.ones((3, 2), np.float32)
        scores = entries.scores(NativeKernels(threads=1).dense, (q, ones), table, len(numbers))
        expected = np.maximum(q @ asked.T, 0).sum(axis=1)
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("ratio", [4, 128])
def test_copied_tokens_take_the_entries_that_they_make_along(ratio):
    """Into another block, whose other tokens make entries of their own there."""
    cache = empty(ratio, 32, 64, 0, CacheType.F16)
    entries = EntryCache(cache, ratio)
    table = np.arange(NUM_BLOCKS, dtype=np.int32)
    first = 128 // ratio - 1  # the entry of tokens up to 127, in block 3
    entries.store(entries.slots(table, np.array([first])), np.full((1, 64), 3.0, np.float32))
    copies = np.array([(3 * 32 + n, 9 * 32 + n) for n in range(32)], np.int32)
    copy_cache(cache.shape, cache.keys, cache.values, copies)
    branch = table.copy()
    branch[3] = 9
    found = entries.rows(entries.slots(branch, np.array([first])), 64).view(np.float16)
    assert (found == 3.0).all()
    entries.store(entries.slots(branch, np.array([first])), np.full((1, 64), 5.0, np.float32))
    kept = entries.rows(entries.slots(table, np.array([first])), 64).view(np.float16)
    assert (kept == 3.0).all()


def test_blocks_that_entries_do_not_fit_are_our_bug():
    """Whoever sizes a cache refuses them."""
    with pytest.raises(AssertionError, match="do not fit"):
        EntryCache(empty(4, 24, 64, 0, CacheType.F16), 4)


def test_rows_are_a_cache_of_single_tokens():
    """Whose blocks are the rows, which are not copied."""
    rows = np.arange(6 * 64, dtype=np.float32).reshape(6, 64).view(np.uint8)
    cache = cache_of_rows(CacheType.F32, rows, 64)
    assert (cache.shape.num_blocks, cache.shape.block_tokens, cache.shape.latent) == (6, 1, 64)
    assert np.shares_memory(cache.keys, rows)
