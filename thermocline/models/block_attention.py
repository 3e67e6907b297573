"""Grouped-query attention to chosen blocks of positions: read from the file, and made of kernels.

A token's row for the indexer is its own key, until its block is whole; then the row of the last token is the block's: the
mean of its keys, normed and turned. Every token is treated by itself, so that results do not depend on the chunk: a block's
keys are taken from the cache, whoever stored them. A token that sees no more blocks than it may read reads all positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.whole_layer import BlockIndexer
from thermocline.models.attention_specs import IndexerSpec
from thermocline.models.choosing import (
    ALL_CHOSEN,
    WORD,
    best,
    far_rows,
    most_read_of,
    rows_of_blocks,
    store_rows,
    turn_heads,
    whole_blocks,
    with_choosing_layers,
    words_of,
)
from thermocline.models.spec import LayerKind
from thermocline.models.streams import sum_in_order

if TYPE_CHECKING:
    from collections.abc import Callable

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
class AskedBlocks:
    """What a chunk's tokens ask an indexer. q: float32 [T, heads, index]."""

    indexer: BlockIndexer
    q: FloatArray

    def chosen(
        self, dense: DenseKernels, chunk: Chunk, cache: LayerCache
    ) -> NDArray[np.uint16] | None:
        """Return which positions each token reads, as `Attending` takes it; None where all read all that they see."""
        block = self.indexer.block
        most, seen = self.indexer.most_read // block, chunk.positions + 1
        num_seen = int(seen.max())
        if num_seen // block <= most:
            return None
        words = np.full((len(seen), -(-num_seen // WORD)), ALL_CHOSEN, np.uint16)
        ones = np.ones(self.q.shape[:2], np.float32)
        for table, rows in far_rows(chunk, seen // block > most):
            part = slice(rows.start, rows.stop)
            counts = seen[part] // block
            num_positions = int(counts[-1]) * block
            scores = dense.index_scores(
                self.q[part], ones[part], table, num_positions, cache, step=block
            )
            for row, count, said in zip(rows, counts.tolist(), scores, strict=True):
                words[row] = words_of(best(said[:count], most), count, block, words.shape[1])
        return words


def ask_blocks(
    kernels: Kernels,
    indexer: BlockIndexer,
    normed: FloatArray,
    turns: tuple[RopeTable, Callable[[IntArray], RopeTable]],
    chunk: Chunk,
    cache: LayerCache,
) -> AskedBlocks:
    """Store the indexer's rows of a chunk's tokens [T, hidden], and return what they ask it.

    turns: rotary embedding at the chunk's positions, and at any others.
    """
    dense, (rope, turns_at) = kernels.dense, turns
    places, q_gain = chunk.places(window=False), indexer.gains[0]
    q, keys = kernels.multiply_all((indexer.q, indexer.k), normed, prompt=chunk.is_prompt)
    heads = q.reshape(len(q), -1, keys.shape[1])
    turn_heads(dense, heads, rope, q_gain, indexer.epsilon)
    store_rows(cache, places, places.slots, keys)
    slots, firsts = whole_blocks(places.segments, chunk.positions, indexer.block, cache)
    if len(slots):
        means = sum_in_order(rows_of_blocks(cache, slots), 1)
        means /= np.float32(indexer.block)
        turn_heads(dense, means, turns_at(firsts), indexer.gains[1], indexer.epsilon)
        store_rows(cache, places, np.ascontiguousarray(slots[:, -1]), means[:, 0])
    return AskedBlocks(indexer, heads)


def with_block_indexer(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return the dimensions with the indexer of layers whose tokens read chosen blocks. Raises ModelError."""
    key = "attention.compress_ratios"
    ratios = read.integers(key, spec.num_layers) if read.has(key) else (0,) * spec.num_layers
    kinds = zip(ratios, spec.layer_kinds, strict=True)
    layers = [n for n, (ratio, kind) in enumerate(kinds) if ratio and kind is LayerKind.ATTENTION]
    if not layers:
        return spec
    block = ratios[layers[0]]
    if any(ratios[layer] != block for layer in layers):
        raise read.bad(key, "differs between layers that attend")
    indexer = IndexerSpec(
        num_heads=read.size(f"{_KEYS}head_count"),
        dim=read.size(f"{_KEYS}key_length", least=spec.rotary_dims),
        most_read=most_read_of(read, block),
        pairs=False,
        layers=(),
        block=block,
    )
    return with_choosing_layers(replace(spec, indexer=indexer), layers)


def read_block_indexer(weights: WeightMap, spec: ModelSpec, index: int) -> BlockIndexer | None:
    """Return the indexer of a layer that attends; None where it reads all positions. Raises ModelFileError."""
    prefix, of, hidden = f"blk.{index}.indexer.", spec.indexer, spec.hidden_size
    if of is None or index not in of.layers:
        weights.leave_out(prefix)
        return None
    q_gain, k_gain = (weights.vector(f"{prefix}{part}_norm.weight", of.dim) for part in "qk")
    return BlockIndexer(
        q=weights.matrix(f"{prefix}q_proj.weight", of.num_heads * of.dim, hidden),
        k=weights.matrix(f"{prefix}k_proj.weight", of.dim, hidden),
        gains=(q_gain, k_gain),
        epsilon=spec.rms_epsilon,
        block=of.block,
        most_read=of.most_read,
    )
