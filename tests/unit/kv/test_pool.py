"""The pool keeps what was written where."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.errors import ConfigError
from thermocline.kernels.cache_format import CacheType, HeadShape, read_cache, write_cache
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex


@pytest.mark.parametrize("cache_type", list(CacheType))
@pytest.mark.parametrize("block_tokens", [1, 4, 16, 33])
def test_the_pool_keeps_layers_and_slots_apart(cache_type, block_tokens):
    """Keys and values are found where they were written, in that layer alone, as their type holds them."""
    rng = np.random.default_rng(1)
    pool = KVPool([HeadShape(2, 64)] * 2, -(-12 // block_tokens), block_tokens, cache_type)
    keys, values = (rng.standard_normal((3, 2, 64)).astype(np.float32) for _ in range(2))
    slots = np.array([1, 11, 6], np.int32)
    cache = pool.layer(LayerIndex(1))
    write_cache(cache.shape, cache.keys, cache.values, slots, keys, values)
    found = read_cache(cache.shape, cache.keys, cache.values, slots)
    step = {CacheType.F32: 0.0, CacheType.F16: 2e-3, CacheType.BF16: 2e-2, CacheType.Q8_0: 2e-2}
    for stored, given_ in zip(found, (keys, values), strict=True):
        np.testing.assert_allclose(stored, given_, rtol=0, atol=step[cache_type])
    others = np.setdiff1d(np.arange(12), slots).astype(np.int32)
    assert not np.any(read_cache(cache.shape, cache.keys, cache.values, others))
    assert not pool.layer(LayerIndex(0)).keys.any()


def test_layers_may_have_fewer_blocks_or_none():
    """A layer with blocks of its own is as large as they are, and one without keeps nothing."""
    own = {LayerIndex(1): 2, LayerIndex(2): 0}
    pool = KVPool([HeadShape(2, 8)] * 3, 8, block_tokens=4, own_blocks=own)
    assert [pool.layer(LayerIndex(n)).shape.num_blocks for n in (0, 1)] == [8, 2]
    assert pool.layer(LayerIndex(1)).keys.shape == (2, 2, 4 * 8 * 4)
    assert pool.reserved_bytes == 2 * (8 + 2) * 2 * 4 * 8 * 4
    with pytest.raises(KeyError):
        pool.layer(LayerIndex(2))


def test_layers_may_have_heads_of_their_own():
    """Each layer takes what its own heads need, and keeps what was written to it."""
    heads = [HeadShape(2, 64), HeadShape(1, 512), HeadShape(2, 24, own_value_dim=16)]
    pool = KVPool(heads, 4, 16)
    assert pool.reserved_bytes == 4 * 16 * (2 * (2 * 64 + 512) + 2 * (24 + 16)) * 4
    slots = np.array([17, 3], np.int32)
    for layer, of in enumerate(heads):
        cache = pool.layer(LayerIndex(layer))
        x = np.random.default_rng(layer).standard_normal((2, of.kv_heads, of.head_dim))
        x = x.astype(np.float32)
        v = -x[..., : of.value_dim]
        write_cache(cache.shape, cache.keys, cache.values, slots, x, v)
        keys, values = read_cache(cache.shape, cache.keys, cache.values, slots)
        np.testing.assert_array_equal(keys, x)
        np.testing.assert_array_equal(values, v)


def test_a_pool_says_what_it_is():
    """The name shows in reports of a failure."""
    pool = KVPool([HeadShape(2, 8)], num_blocks=3, block_tokens=4)
    assert repr(pool) == "KVPool(1 layers, 3 blocks of 4 tokens, F32)"


@pytest.mark.parametrize(
    ("cache_type", "row_bytes"),
    [
        (CacheType.F32, 512),
        (CacheType.F16, 256),
        (CacheType.BF16, 256),
        (CacheType.Q8_0, 136),
    ],
)
def test_a_large_pool_costs_no_memory_until_it_is_used(cache_type, row_bytes):
    """Gigabytes of address space can be reserved on a small machine, as many as the type needs."""
    pool = KVPool([HeadShape(4, 128)] * 8, 1 << 16, 16, cache_type)
    assert pool.reserved_bytes == 2 * 8 * (1 << 20) * 4 * row_bytes


def test_an_impossible_pool_is_a_typed_error():
    """What the system can not even reserve says which flag to turn."""
    with pytest.raises(ConfigError, match="--ctx"):
        KVPool([HeadShape(4, 128)], num_blocks=1 << 50, block_tokens=16)
