"""Rows of a cache go to another one bit for bit, whatever its type and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.written_cache import written_cache
from thermocline.kernels.cache_format import (
    CacheShape,
    CacheType,
    HeadShape,
    put_cached,
    read_cache,
    read_index,
    read_latent,
    take_cached,
    write_index,
    write_latent,
)

SOURCES, TARGETS = np.array([4, 1, 11], np.int32), np.array([2, 0, 6], np.int32)


@pytest.mark.parametrize("cache_type", CacheType)
@pytest.mark.parametrize(("block_tokens", "value_dim"), [(1, 0), (5, 0), (16, 0), (40, 0), (5, 96)])
def test_another_cache_gets_the_rows_and_nothing_else(cache_type, block_tokens, value_dim):
    """Between groups of keys of other widths, in other slots, values of another size; every other byte stays."""
    shape = CacheShape(cache_type, 6, block_tokens, 3, 64, own_value_dim=value_dim)
    rng = np.random.default_rng(block_tokens)
    every = np.arange(6 * block_tokens, dtype=np.int32)
    (keys, values), (to_keys, to_values) = (written_cache(shape, rng) for _ in range(2))
    there = read_cache(shape, to_keys, to_values, every)
    sources, targets = (rng.permutation(every)[: len(every) // 2] for _ in range(2))
    taken = take_cached(shape, keys, values, sources)
    token_bytes = HeadShape(3, 64, own_value_dim=value_dim).token_bytes(cache_type)
    assert taken.shape == (len(sources), token_bytes)
    put_cached(shape, to_keys, to_values, targets, taken)
    here = read_cache(shape, keys, values, every)
    for found, old, given in zip(
        read_cache(shape, to_keys, to_values, every), there, here, strict=True
    ):
        expected = old.copy()
        expected[targets] = given[sources]
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("cache_type", CacheType)
def test_latent_rows_too(cache_type):
    """A latent cache has keys alone."""
    shape = CacheShape(cache_type, 4, 3, 1, 96, latent=64)
    rng = np.random.default_rng(1)
    keys, to_keys = (np.zeros(shape.array_shape, np.uint8) for _ in range(2))
    values = np.empty(shape.value_shape, np.uint8)
    every = np.arange(12, dtype=np.int32)
    write_latent(shape, keys, every, rng.standard_normal((12, 96)).astype(np.float32))
    taken = take_cached(shape, keys, values, SOURCES)
    assert taken.shape == (3, shape.heads.token_bytes(cache_type))
    put_cached(shape, to_keys, values, TARGETS, taken)
    assert_moved(read_latent(shape, keys, every), read_latent(shape, to_keys, every))


@pytest.mark.parametrize("cache_type", CacheType)
@pytest.mark.parametrize("latent", [0, 64])
def test_rows_of_an_indexer_too(cache_type, latent):
    """They lie beside keys and values, and beside keys alone."""
    shape = CacheShape(cache_type, 4, 3, 1, 96, latent=latent, index=32)
    rng = np.random.default_rng(2)
    arrays, others = (
        [rng.integers(0, 100, each, np.uint8) for each in (shape.array_shape, shape.value_shape)]
        for _ in range(2)
    )
    index, to_index = (np.zeros(shape.index_shape, np.uint8) for _ in range(2))
    every = np.arange(12, dtype=np.int32)
    write_index(shape, index, every, rng.standard_normal((12, 32)).astype(np.float32))
    taken = take_cached(shape, *arrays, SOURCES, index)
    assert taken.shape == (3, shape.heads.token_bytes(cache_type))
    put_cached(shape, *others, TARGETS, taken, to_index)
    assert_moved(read_index(shape, index, every), read_index(shape, to_index, every))
    assert take_cached(shape, *others, TARGETS, to_index).tobytes() == taken.tobytes()


def assert_moved(here, there):
    """What was at the sources is at the targets, and nothing else anywhere."""
    expected = np.zeros_like(here)
    expected[TARGETS] = here[SOURCES]
    assert there.tobytes() == expected.tobytes()
