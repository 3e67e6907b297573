"""What an indexer says of cached positions, in every implementation and type of cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.kernels.test_dense import dense  # noqa: F401 - a fixture
from thermocline.kernels.cache_format import CacheShape, CacheType, read_index, write_index
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import LayerCache
from thermocline.kernels.dense_reference import ReferenceDense

NUM_BLOCKS = 40


def written(cache_type: CacheType, block_tokens: int, dim: int, seed: int = 0):
    """Return a cache, and its rows by slot as they are read."""
    shape = CacheShape(cache_type, NUM_BLOCKS, block_tokens, 1, 96, latent=64, index=dim)
    index = np.zeros(shape.index_shape, np.uint8)
    slots = np.arange(NUM_BLOCKS * block_tokens, dtype=np.int32)
    rng = np.random.default_rng(seed)
    write_index(shape, index, slots, rng.standard_normal((len(slots), dim)).astype(np.float32))
    keys, values = (np.empty(each, np.uint8) for each in (shape.array_shape, shape.value_shape))
    return LayerCache(shape, keys, values, index), read_index(shape, index, slots)


@pytest.mark.parametrize("cache_type", CacheType)
@pytest.mark.parametrize("block_tokens", [1, 5, 16, 40])
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (13, 64), (64, 128)])
def test_scores_are_weighted_sums_of_what_heads_find(dense, cache_type, block_tokens, heads, dim):  # noqa: F811
    """Sum of weight * max(0, q . row), or of weight * q . row, over scattered blocks, for any number of positions.

    Each token by itself.
    """
    cache, rows = written(cache_type, block_tokens, dim)
    rng = np.random.default_rng(heads)
    table = rng.permutation(NUM_BLOCKS).astype(np.int32)
    count = NUM_BLOCKS * block_tokens - block_tokens // 2
    q = rng.standard_normal((5, heads, dim)).astype(np.float32)
    weights = rng.standard_normal((5, heads)).astype(np.float32)
    found = dense.index_scores(q, weights, table, count, cache)

    positions = np.arange(count)
    slots = table[positions // block_tokens] * block_tokens + positions % block_tokens
    products = q.astype(np.float64) @ rows[slots].T.astype(np.float64)
    expected = np.einsum("th,thp->tp", weights, np.maximum(products, 0))
    size = np.abs(weights).sum(axis=1, keepdims=True) * np.sqrt(dim)
    assert (np.abs(found - expected) <= 1e-5 * size).all()

    fewer = dense.index_scores(q[3:4], weights[3:4], table, count // 2 + 1, cache)
    np.testing.assert_array_equal(fewer[0], found[3, : count // 2 + 1])

    plain = dense.index_scores(q, weights, table, count, cache, clips=False)
    expected = np.einsum("th,thp->tp", weights, products)
    assert (np.abs(plain - expected) <= 1e-5 * size).all()


@pytest.mark.parametrize("cache_type", CacheType)
@pytest.mark.parametrize("block_tokens", [5, 16])
@pytest.mark.parametrize("step", [2, 4, 7, 300])
def test_steps_score_the_last_position_of_each_run(dense, cache_type, block_tokens, step):  # noqa: F811
    """To the bit what all positions' scores have there; a run that is not whole has none."""
    cache, _ = written(cache_type, block_tokens, 64)
    rng = np.random.default_rng(step)
    table = rng.permutation(NUM_BLOCKS).astype(np.int32)
    q = rng.standard_normal((3, 5, 64)).astype(np.float32)
    weights = rng.standard_normal((3, 5)).astype(np.float32)
    for count in (NUM_BLOCKS * block_tokens, NUM_BLOCKS * block_tokens - 1, step, step - 1):
        if count > NUM_BLOCKS * block_tokens:
            continue
        every = dense.index_scores(q, weights, table, count, cache)
        found = dense.index_scores(q, weights, table, count, cache, step=step)
        assert found.shape == (3, count // step)
        if isinstance(dense, ReferenceDense):
            # BLAS adds in another order for other numbers of rows.
            np.testing.assert_allclose(found, every[:, step - 1 :: step], rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, every[:, step - 1 :: step])


def test_rows_of_any_size(dense):  # noqa: F811
    """Rows that fill no vector, one position, and no token."""
    cache, rows = written(CacheType.F16, 3, 18)
    table = np.arange(NUM_BLOCKS, dtype=np.int32)
    q, weights = np.ones((1, 2, 18), np.float32), np.array([[1.0, -3.0]], np.float32)
    (found,) = dense.index_scores(q, weights, table, 1, cache)
    np.testing.assert_allclose(found, [-2 * max(0.0, rows[0].sum())], rtol=1e-5, atol=1e-6)
    assert dense.index_scores(q[:0], weights[:0], table, 7, cache).shape == (0, 7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"table": [0, NUM_BLOCKS]}, "a block lies beyond the cache"),
        ({"table": [0, -1]}, "a block lies beyond the cache"),
        ({"count": 11}, "a position lies beyond the block table"),
        ({"count": 12, "step": 3}, "a position lies beyond the block table"),
        ({"step": -1, "count": 0}, "a step has positions"),
        ({"heads": 3}, r"weights must be \[tokens, heads\]"),
        ({"dim": 64}, "the cache must be"),
    ],
)
def test_the_core_reads_nothing_beside_the_cache(change, says):
    """Tables, counts and sizes that do not fit each other are refused."""
    cache, _ = written(CacheType.F32, 5, 32)
    given = {"table": [0, 1], "count": 10, "heads": 2, "dim": 32, "step": 1} | change
    q = np.zeros((1, given["heads"], given["dim"]), np.float32)
    table = np.array(given["table"], np.int32)
    with pytest.raises(ValueError, match=says):
        NativeKernels(threads=1).dense.index_scores(
            q, np.zeros((1, 2), np.float32), table, given["count"], cache, step=given["step"]
        )
