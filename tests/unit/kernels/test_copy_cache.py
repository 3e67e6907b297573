"""Keys and values are copied bit for bit, whatever the type of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.written_cache import written_cache
from thermocline.kernels.cache_format import (
    CacheShape,
    CacheType,
    copy_cache,
    read_cache,
    read_index,
    read_latent,
    write_index,
    write_latent,
)


@pytest.mark.parametrize("cache_type", CacheType)
@pytest.mark.parametrize(("block_tokens", "value_dim"), [(1, 0), (5, 0), (16, 0), (40, 0), (5, 32)])
def test_slots_get_what_others_have(cache_type, block_tokens, value_dim):
    """Between groups of keys of other widths, with values of another size, too; all other slots stay."""
    shape = CacheShape(cache_type, 6, block_tokens, 3, 64, own_value_dim=value_dim)
    rng = np.random.default_rng(block_tokens)
    keys, values = written_cache(shape, rng)
    every = np.arange(6 * block_tokens, dtype=np.int32)
    before = read_cache(shape, keys, values, every)
    order = rng.permutation(every)
    half = len(order) // 2
    pairs = np.stack((order[:half], order[half : 2 * half]), axis=1).astype(np.int32)
    copy_cache(shape, keys, values, pairs)
    expected = every.copy()
    expected[pairs[:, 1]] = pairs[:, 0]
    for found, old in zip(read_cache(shape, keys, values, every), before, strict=True):
        assert found.tobytes() == old[expected].tobytes()


@pytest.mark.parametrize("cache_type", CacheType)
@pytest.mark.parametrize("index", [0, 32])
def test_latent_rows_are_copied(cache_type, index):
    """A latent cache has keys, and may have an indexer's rows."""
    shape = CacheShape(cache_type, 4, 3, 1, 96, latent=64, index=index)
    rng = np.random.default_rng(1)
    keys, values = (np.zeros(each, np.uint8) for each in (shape.array_shape, shape.value_shape))
    every = np.arange(12, dtype=np.int32)
    write_latent(shape, keys, every, rng.standard_normal((12, 96)).astype(np.float32))
    rows = np.zeros(shape.index_shape, np.uint8) if index else None
    if rows is not None:
        write_index(shape, rows, every, rng.standard_normal((12, index)).astype(np.float32))

    def read():
        yield read_latent(shape, keys, every)
        if rows is not None:
            yield read_index(shape, rows, every)

    before = list(read())
    copy_cache(shape, keys, values, np.array([[1, 11], [4, 0]], np.int32), rows)
    expected = [4, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]
    for found, old in zip(read(), before, strict=True):
        assert found.tobytes() == old[expected].tobytes()
