"""What attention to chosen positions shares, whatever it is of: an indexer's rows and turned heads, and the best of some scores.

Where positions are chosen in blocks, a token's row is its own until its block is whole; then the last token's is the block's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.kernels.cache_format import (
    CacheShape,
    CacheType,
    copy_cache,
    read_index,
    write_index,
)
from thermocline.kernels.dense_contract import HeadNorm, LayerCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from thermocline.kernels.dense_contract import DenseKernels, RopeTable
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import CachePlaces, Chunk, Segment
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec

WORD: Final = 16
"""Positions of a word of a choice."""
ALL_CHOSEN: Final = 0xFFFF
"""A word of which all positions are read."""
SCORED_TOGETHER: Final = 32
"""Tokens whose scores are in memory at a time: 20 MiB in a context of 160,000."""


class LoneToken(NamedTuple):
    """A `TokenRun` of one token, whose blocks are the rows that it reads."""

    start: int
    length: int
    block_table: IntArray
    num_expanded: int = 0


def best(scores: FloatArray, count: int) -> IntArray:
    """Return the places of the highest scores, ascending; of equal ones the first."""
    ranked = np.fmax(scores, -np.inf)  # what is not a number is the least
    least = np.partition(ranked, len(ranked) - count)[len(ranked) - count]
    taken = ranked > least
    ties = np.flatnonzero(ranked == least)
    taken[ties[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken).astype(np.int32)


def turn_heads(
    dense: DenseKernels,
    heads: FloatArray,
    rope: RopeTable,
    gain: FloatArray | None = None,
    epsilon: float = 0.0,
) -> None:
    """Turn the first numbers of heads [T, count, dim] in place. gain: float32 [dim], of an RMS norm before it."""
    tokens, _, dim = heads.shape
    shape = CacheShape(CacheType.F32, tokens, 1, 1, dim)  # nothing is written to it
    keys, values = (np.empty(each, np.uint8) for each in (shape.array_shape, shape.value_shape))
    nowhere, slots = LayerCache(shape, keys, values), np.arange(tokens, dtype=np.int32)
    dense.prepare_heads(heads, None, None, HeadNorm(gain, None, epsilon), rope, nowhere, slots)


def store_rows(cache: LayerCache, places: CachePlaces, slots: IntArray, rows: FloatArray) -> None:
    """Store an indexer's rows in `slots`, and where else branches look for them."""
    shape, index = cache.shape, cache.index
    assert index is not None, "a cache without rows for an indexer"
    write_index(shape, index, slots, rows)
    if places.copies is not None:
        copy_cache(shape, cache.keys, cache.values, places.copies, index)


def whole_blocks(
    segments: Sequence[Segment], positions: IntArray, block: int, cache: LayerCache
) -> tuple[IntArray, IntArray]:
    """Return the slots of each block that a chunk completes, int32 [n, block], and the first position of each."""
    size, slots, firsts = cache.shape.block_tokens, [], []
    for segment in segments:
        own = positions[segment.start : segment.start + segment.length]
        first = own[(own + 1) % block == 0] + np.int32(1 - block)
        blocks, places = np.divmod(first[:, None] + np.arange(block, dtype=np.int32), size)
        slots.append(segment.block_table[blocks] * np.int32(size) + places)
        firsts.append(first)
    return np.concatenate(slots).astype(np.int32), np.concatenate(firsts)


def rows_of_blocks(cache: LayerCache, slots: IntArray) -> FloatArray:
    """Return the indexer's rows in `slots` [n, block]: float32 [n, block, index]."""
    assert cache.index is not None, "a cache without rows for an indexer"
    found = read_index(cache.shape, cache.index, slots.reshape(-1))
    return found.reshape(*slots.shape, -1)


def far_rows(chunk: Chunk, is_far: NDArray[np.bool_]) -> Iterator[tuple[IntArray, range]]:
    """Yield the blocks of a sequence, and rows of its tokens that choose, no more than are scored together.

    is_far: [T], whether a token sees more than it may read; of each sequence so do the last ones.
    """
    for segment in chunk.places(window=False).segments:
        end = segment.start + segment.length
        first = end - np.count_nonzero(is_far[segment.start : end])
        for start in range(first, end, SCORED_TOGETHER):
            yield segment.block_table, range(start, min(start + SCORED_TOGETHER, end))


def words_of(chosen: IntArray, count: int, block: int, num_words: int) -> NDArray[np.uint16]:
    """Return a token's words, uint16 [num_words]: of the chosen ones of `count` blocks, and of all behind these."""
    bits = np.zeros(count, bool)
    bits[chosen] = True
    positions = np.ones(max(num_words * WORD, count * block), bool)
    positions[: count * block] = np.repeat(bits, block)
    return np.packbits(positions[: num_words * WORD], bitorder="little").view("<u2")


def most_read_of(read: SpecReader, block: int) -> int:
    """Return how many positions a token reads, of which `block` are chosen together. Raises ModelFileError."""
    key = "attention.indexer.top_k"
    most_read = read.size(key)
    if most_read % block:
        raise read.bad(key, f"is {most_read}, no multiple of the {block} that are chosen together")
    return most_read


def with_choosing_layers(spec: ModelSpec, layers: Iterable[int]) -> ModelSpec:
    """Return the dimensions with an indexer in these layers alone."""
    indexer = spec.indexer
    assert indexer is not None, "a model without an indexer"
    chosen = tuple(layers)
    shapes = tuple(
        replace(shape, index=indexer.row if layer in chosen else 0)
        for layer, shape in enumerate(spec.kv_shapes)
    )
    return replace(spec, indexer=replace(indexer, layers=chosen), own_kv_shapes=shapes)
