"""Grouped-query attention whose key heads each read chosen blocks of positions: read from the file, and made of kernels.

An indexer has a head of queries for each key head, and a row for each token. A block is as good as the best of its positions
that a token sees; the last blocks are always read. Every token is treated by itself, so that results do not depend on the
chunk. A token that sees no more blocks than it may read reads all positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.whole_layer import HeadIndexer
from thermocline.models.attention_specs import IndexerSpec
from thermocline.models.choosing import (
    ALL_CHOSEN,
    WORD,
    best,
    far_rows,
    store_rows,
    turn_heads,
    with_choosing_layers,
    words_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels, LayerCache, RopeTable
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import Chunk
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_KEYS: Final = "attention.indexer."


@dataclass(frozen=True, slots=True, eq=False)
class AskedByHeads:
    """What a chunk's tokens ask an indexer. q: float32 [T, kv_heads, index]."""

    indexer: HeadIndexer
    q: FloatArray

    def chosen(
        self, dense: DenseKernels, chunk: Chunk, cache: LayerCache
    ) -> NDArray[np.uint16] | None:
        """Return which positions each token reads, as `Attending` takes it; None where all read all that they see."""
        block, most = self.indexer.block, self.indexer.most_blocks
        num_seen = int(chunk.positions.max()) + 1
        if num_seen <= most * block:
            return None
        num_heads = self.q.shape[1]
        words = np.full((len(self.q), num_heads, -(-num_seen // WORD)), ALL_CHOSEN, np.uint16)
        for table, rows in far_rows(chunk, chunk.positions >= most * block):
            positions = chunk.positions[rows.start : rows.stop].tolist()
            scores = self._scores(dense, rows, table, positions[-1], cache)
            for row, position, said in zip(rows, positions, scores, strict=True):
                self._choose(said, position, words[row])
        return words

    def _scores(
        self, dense: DenseKernels, rows: range, table: IntArray, last: int, cache: LayerCache
    ) -> FloatArray:
        """Return what some tokens' heads say of the positions up to `last`: float32 [n, kv_heads, last + 1]."""
        q = self.q[rows.start : rows.stop]
        each = q.reshape(-1, 1, q.shape[2])
        ones = np.ones((len(each), 1), np.float32)
        scores = dense.index_scores(each, ones, table, last + 1, cache, clips=False)
        return scores.reshape(*q.shape[:2], -1)

    def _choose(self, said: FloatArray, position: int, words: NDArray[np.uint16]) -> None:
        """Write a token's words [kv_heads, words]. said: float32 [kv_heads, positions], of those that it sees, and maybe more."""
        block, last = self.indexer.block, position // self.indexer.block
        firsts = np.arange(0, position + 1, block)
        of_blocks = np.maximum.reduceat(said[:, : position + 1], firsts, axis=1)
        of_blocks[:, last + 1 - min(self.indexer.local, last + 1) :] = np.inf
        for head, scores in enumerate(of_blocks):
            chosen = best(scores, self.indexer.most_blocks)
            words[head] = words_of(chosen, last + 1, block, words.shape[1])


def ask_by_heads(
    kernels: Kernels,
    indexer: HeadIndexer,
    normed: FloatArray,
    rope: RopeTable,
    chunk: Chunk,
    cache: LayerCache,
) -> AskedByHeads:
    """Store the indexer's rows of a chunk's tokens [T, hidden], and return what they ask it."""
    dense, places, (q_gain, k_gain) = kernels.dense, chunk.places(window=False), indexer.gains
    q, keys = kernels.multiply_all((indexer.q, indexer.k), normed, prompt=chunk.is_prompt)
    heads, rows = (each.reshape(len(q), -1, keys.shape[1]) for each in (q, keys))
    turn_heads(dense, heads, rope, q_gain, indexer.epsilon)
    turn_heads(dense, rows, rope, k_gain, indexer.epsilon)
    store_rows(cache, places, places.slots, rows[:, 0])
    return AskedByHeads(indexer, heads)


def with_head_indexer(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return the dimensions with an indexer in all layers that have experts. Raises ModelError."""
    read.require_equal(f"{_KEYS}head_count", spec.num_kv_heads)
    top_k, local = read.size(f"{_KEYS}top_k"), read.count(f"{_KEYS}local_blocks")
    if local > top_k:
        what = f"is {local}, of {top_k} blocks that a token reads"
        raise read.bad(f"{_KEYS}local_blocks", what)
    block = read.size(f"{_KEYS}block_size")
    indexer = IndexerSpec(
        num_heads=read.size(f"{_KEYS}head_count"),
        dim=read.size(f"{_KEYS}key_length", least=spec.rotary_dims),
        most_read=top_k * block,
        pairs=False,
        layers=(),
        block=block,
        local=local,
        by_head=True,
    )
    layers = (n for n in range(spec.num_layers) if n not in spec.dense_layers)
    return with_choosing_layers(replace(spec, indexer=indexer), layers)


def read_head_indexer(weights: WeightMap, spec: ModelSpec, index: int) -> HeadIndexer | None:
    """Return the indexer of a layer; None where it reads all positions. Raises ModelFileError."""
    prefix, of, hidden = f"blk.{index}.indexer.", spec.indexer, spec.hidden_size
    if of is None or index not in of.layers:
        return None
    q_gain, k_gain = (weights.vector(f"{prefix}{part}_norm.weight", of.dim) for part in "qk")
    return HeadIndexer(
        q=weights.matrix(f"{prefix}q_proj.weight", of.num_heads * of.dim, hidden),
        k=weights.matrix(f"{prefix}k_proj.weight", of.dim, hidden),
        gains=(q_gain, k_gain),
        epsilon=spec.rms_epsilon,
        block=of.block,
        most_blocks=of.most_read // of.block,
        local=of.local,
    )
