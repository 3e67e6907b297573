"""How entries, which are each made of many tokens' rows, lie in a cache: in place of what tokens would keep themselves.

An entry takes the place of some tokens, in the block of its last one, so that blocks which are shared hold nothing of
tokens behind them. Knows no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.cache_format import (
    CacheShape,
    CacheType,
    HeadShape,
    write_index,
    write_latent,
)
from thermocline.kernels.dense_contract import LayerCache
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.weight import ByteArray, FloatArray, IntArray

BLOCK_STEP: Final = 16
"""Tokens of a block are a multiple of this in a cache with entries."""


def places_of(ratio: int) -> int:
    """Return the places of how many tokens an entry takes that is made of every `ratio` ones."""
    return min(ratio, BLOCK_STEP)


def entry_shape(ratio: int, dim: int, index: int) -> HeadShape:
    """Return what a token keeps, so that its entry of `dim` numbers fits, and that of an indexer of `index` numbers."""
    places = places_of(ratio)
    own = ceil_div(dim, places)
    return HeadShape(1, own, latent=own, index=ceil_div(index, places))


class EntryCache:
    """One layer's cache as entries: `cache`, of which each token is one."""

    def __init__(self, cache: LayerCache, ratio: int) -> None:
        shape, places = cache.shape, places_of(ratio)
        assert shape.block_tokens % BLOCK_STEP == 0, "entries do not fit such blocks"
        dim = places * shape.head_dim
        heads = HeadShape(1, dim, latent=dim, index=places * shape.index)
        own = CacheShape.of(shape.type, shape.num_blocks, shape.block_tokens // places, heads)
        index = None if cache.index is None else cache.index.reshape(own.index_shape)
        keys = cache.keys.reshape(own.array_shape)
        self.cache = LayerCache(own, keys, cache.values, index)
        self._ratio, self._block_tokens = ratio, shape.block_tokens

    def slots(self, block_table: IntArray, numbers: IntArray) -> IntArray:
        """Return where a sequence's entries of these numbers are, int32 [n]."""
        return self.slots_of(self.last_slots(block_table, numbers))

    def last_slots(self, block_table: IntArray, numbers: IntArray) -> IntArray:
        """Return the slots of the last tokens of these entries, int32 [n]."""
        last = numbers * self._ratio + (self._ratio - 1)
        blocks, places = np.divmod(last, self._block_tokens)
        slots: IntArray = (block_table[blocks] * self._block_tokens + places).astype(np.int32)
        return slots

    def slots_of(self, last_slots: IntArray) -> IntArray:
        """Return where the entries are whose last tokens lie in these slots, int32 [n]."""
        blocks, places = np.divmod(last_slots, self._block_tokens)
        own = self.cache.shape.block_tokens
        slots: IntArray = (blocks * own + places // self._ratio).astype(np.int32)
        return slots

    def store(self, slots: IntArray, entries: FloatArray, index: FloatArray | None = None) -> None:
        """Store entries [n, dim], and an indexer's [n, index], in `slots`."""
        shape = self.cache.shape
        write_latent(shape, self.cache.keys, slots, _padded(entries, shape.head_dim))
        if index is not None:
            assert self.cache.index is not None, "a cache without rows for an indexer"
            write_index(shape, self.cache.index, slots, _padded(index, shape.index))

    def scores(
        self,
        dense: DenseKernels,
        asked: tuple[FloatArray, FloatArray],
        block_table: IntArray,
        count: int,
    ) -> FloatArray:
        """Return what an indexer says of a sequence's first `count` entries. asked: q and weights of `DenseKernels.index_scores`."""
        q, weights = asked
        behind = self.cache.shape.index - q.shape[2]
        padded = np.pad(q, ((0, 0), (0, 0), (0, behind))) if behind else q
        return dense.index_scores(padded, weights, block_table, count, self.cache)

    def rows(self, slots: IntArray, dim: int) -> ByteArray:
        """Return entries of `dim` numbers in the cache's type: uint8 [n, bytes of a row]."""
        shape = self.cache.shape
        rows = self.cache.keys.reshape(-1, shape.row_bytes)
        taken: ByteArray = rows[slots, : shape.type.row_bytes(dim)]
        return taken


def cache_of_rows(cache_type: CacheType, rows: ByteArray, dim: int) -> LayerCache:
    """Return rows, uint8 [n, bytes of `dim` numbers], as a latent cache whose blocks are single tokens."""
    shape = CacheShape(cache_type, len(rows), 1, 1, dim, latent=dim)
    return LayerCache(shape, rows.reshape(shape.array_shape), np.empty(shape.value_shape, np.uint8))


def _padded(rows: FloatArray, width: int) -> FloatArray:
    """Return rows [n, dim] with zeros behind them: [n, width]."""
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
