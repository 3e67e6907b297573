"""Latent attention made of kernels: over all positions, or over those that an indexer chooses for each token.

Every token is treated by itself, so that results do not depend on the chunk. A token that sees no more positions than it may
read takes the same way as without an indexer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from thermocline.kernels.cache_format import row_by_row
from thermocline.kernels.dense_contract import Activation, Attending, LayerCache
from thermocline.models.choosing import (
    SCORED_TOGETHER,
    LoneToken,
    best,
    rows_of_blocks,
    store_rows,
    turn_heads,
    whole_blocks,
)
from thermocline.models.layers import copy_for_branches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels, RopeTable, TokenRun
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kernels.whole_layer import Indexer, KeyPool, LatentWeights
    from thermocline.messages import CachePlaces, Chunk, Segment

_READ_TOGETHER: Final = 128
"""Tokens whose queries are in the terms of cached rows at a time: 38 MB for 128 heads. Fewer leave threads idle."""


class ChosenSlots(NamedTuple):
    """Which slots of the cache some of a chunk's rows read. rows: int32 [n]; slots: n arrays of int32."""

    rows: IntArray
    slots: Sequence[IntArray]


class Choices:
    """The last choice of each chunk in flight, for layers without an indexer of their own. For one thread at a time."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[Chunk, ChosenSlots] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, chunk: Chunk, choice: ChosenSlots) -> None:
        """Keep what a layer's indexer chose."""
        self._last[chunk] = choice

    def last(self, chunk: Chunk) -> ChosenSlots:
        """Return what the last indexer before a layer chose."""
        return self._last[chunk]


class _Asked(NamedTuple):
    """What a chunk's tokens ask an indexer. q: float32 [T, heads, index]; weights: float32 [T, heads]."""

    q: FloatArray
    weights: FloatArray


def begin_latent_attention(
    kernels: Kernels,
    weights: LatentWeights,
    rope: RopeTable,
    chunk: Chunk,
    x: FloatArray,
    cache: LayerCache,
    choices: Choices | None = None,
) -> Callable[[], FloatArray]:
    """Append the chunk's rows to `cache`; return what gives x [T, D] plus latent attention over it.

    choices: of the model, where its layers read chosen positions. Of weights with `NO_NORM` it gives attention alone.
    """
    dense, prompt, epsilon = kernels.dense, chunk.is_prompt, weights.kv_norm.epsilon
    has_norm = len(weights.norm) > 0
    normed = dense.rms_norm(x, weights.norm, epsilon) if has_norm else x
    low, places = weights.low, chunk.places(window=weights.window > 0)
    first = weights.q if low is None else low.weight
    q, kv = kernels.multiply_all((first, weights.kv), normed, prompt=prompt)
    asked = None
    if low is not None:
        ranked = dense.rms_norm(q, low.gain, epsilon)
        q = kernels.matmul(weights.q, ranked, prompt=prompt)
        if weights.indexer is not None:
            asked = _ask(kernels, weights.indexer, (normed, ranked), rope, chunk, cache)
    q = q.reshape(len(x), len(weights.up.keys), -1)
    gates = None
    if weights.gate is not None:
        # Of each head, or of each of its numbers.
        gates = kernels.matmul(weights.gate, normed, prompt=prompt)
        gates = gates.reshape(q.shape[0] * q.shape[1], -1)
    if weights.turned_gain is not None:
        turned = np.ascontiguousarray(kv[:, len(weights.kv_norm.gain) :])
        kv[:, len(weights.kv_norm.gain) :] = dense.rms_norm(turned, weights.turned_gain, epsilon)
    dense.prepare_latent(q, kv, weights.kv_norm, rope, cache, places.slots)
    copy_for_branches(cache, places)

    def finish() -> FloatArray:
        near = _near(places.segments, chunk.positions, weights)
        values = _read_all(kernels, weights, chunk, q, cache, near)
        if weights.most_read:
            assert choices is not None, (
                "a model whose layers read chosen positions keeps the choices"
            )
            if asked is not None:
                chosen = _choose(dense, asked, chunk, near, cache, weights)
                choices.note(chunk, chosen)
            _read_chosen(kernels, weights, choices.last(chunk), q, cache, values)
        if gates is not None:
            values = dense.gate(values.reshape(len(gates), -1), gates, Activation.SIGMOID)
        add = x if has_norm else None
        return kernels.matmul(weights.output, values.reshape(len(x), -1), add=add, prompt=prompt)

    return finish


def _near(segments: Sequence[Segment], positions: IntArray, weights: LatentWeights) -> list[int]:
    """Return how many first tokens of each segment read all positions that they see."""
    if not weights.most_read:
        return [segment.length for segment in segments]
    # Of an incomplete block all is read.
    most_seen = weights.most_read + weights.block - 1
    firsts = (most_seen - int(positions[segment.start]) for segment in segments)
    return [min(max(0, n), each.length) for n, each in zip(firsts, segments, strict=True)]


def _read_all(
    kernels: Kernels,
    weights: LatentWeights,
    chunk: Chunk,
    q: FloatArray,
    cache: LayerCache,
    near: Sequence[int],
) -> FloatArray:
    """Return float32 [T, heads, value_dim] of the near tokens; the other rows are not yet written."""
    segments, prompt = chunk.places(window=weights.window > 0).segments, chunk.is_prompt
    values = np.empty((*q.shape[:2], weights.up.values.raw.shape[1]), np.float32)
    rule = Attending(weights.scale, temperature=weights.temperature)
    pairs = zip(segments, near, strict=True)
    may_expand = weights.sinks is None and not weights.window
    expanded = [min(segment.num_expanded, end) if may_expand else 0 for segment, end in pairs]
    rows, runs = _cut(segments, [0] * len(segments), expanded)
    if runs:
        values[rows] = kernels.expanded_attention(
            weights.up, q[rows], chunk.positions[rows], runs, cache, rule, prompt=prompt
        )
    rows, runs = _cut(segments, expanded, near)
    if runs:
        values[rows] = _absorbed(
            kernels, weights, q[rows], chunk.positions[rows], runs, cache, prompt=prompt
        )
    return values


def _absorbed(
    kernels: Kernels,
    weights: LatentWeights,
    q: FloatArray,
    positions: IntArray,
    runs: Sequence[TokenRun],
    cache: LayerCache,
    *,
    prompt: bool,
) -> FloatArray:
    """Return float32 [rows, heads, value_dim]: attention whose queries are in the terms of cached rows."""
    up = weights.up
    rule = Attending(
        weights.scale,
        window=weights.window,
        sinks=weights.sinks,
        temperature=weights.temperature,
    )
    plain, turned = np.split(q, [up.keys.cols], axis=-1)
    absorbed = kernels.multiply_heads(up.keys, np.ascontiguousarray(plain))
    queries = np.concatenate((absorbed, turned), axis=-1)
    read = kernels.dense.attention(queries, positions, runs, cache, rule, prompt=prompt)
    return kernels.multiply_heads(up.values, read)


def _cut(
    segments: Sequence[Segment], firsts: Sequence[int], ends: Sequence[int]
) -> tuple[IntArray, tuple[Segment, ...]]:
    """Return the rows of each segment's tokens [first, end), int32, and runs of just these."""
    rows: list[int] = []
    runs = []
    for segment, first, end in zip(segments, firsts, ends, strict=True):
        if end > first:
            runs.append(segment._replace(start=len(rows), length=end - first))
            rows += range(segment.start + first, segment.start + end)
    return np.array(rows, np.int32), tuple(runs)


def _ask(
    kernels: Kernels,
    indexer: Indexer,
    inputs: tuple[FloatArray, FloatArray],
    rope: RopeTable,
    chunk: Chunk,
    cache: LayerCache,
) -> _Asked:
    """Store the indexer's rows of a chunk's tokens, and return what they ask it.

    inputs: the layer's normed input [T, hidden], and what its queries are made of [T, rank].
    """
    dense, prompt, (normed, ranked) = kernels.dense, chunk.is_prompt, inputs
    queries = kernels.matmul(indexer.q, ranked, prompt=prompt)
    rows = dense.layer_norm(
        kernels.matmul(indexer.k, normed, prompt=prompt), indexer.gain, indexer.epsilon
    )
    dim = rows.shape[1]
    heads = np.concatenate((queries.reshape(len(rows), -1, dim), (rows + indexer.bias)[:, None]), 1)
    if indexer.turns_last:  # a head's numbers may have any order
        heads = np.roll(heads, 2 * rope.cosines.shape[1], axis=2)
    turn_heads(dense, heads, replace(rope, pairs=indexer.pairs))
    keys, places = heads[:, -1], chunk.places(window=False)
    said = kernels.matmul(indexer.weights, normed) * np.float32(indexer.scale)
    if indexer.pool is None:
        store_rows(cache, places, places.slots, keys)
        return _Asked(np.ascontiguousarray(heads[:, :-1]), said)
    weighed = kernels.matmul(indexer.pool.gate, normed, prompt=prompt)
    store_rows(cache, places, places.slots, np.concatenate((keys, weighed), axis=1))
    _pool_keys(dense, indexer.pool, chunk, places, cache)
    # Behind a block's key lies nothing that a query asks for.
    padded = np.concatenate((heads[:, :-1], np.zeros_like(heads[:, :-1])), axis=2)
    return _Asked(padded, said)


def _pool_keys(
    dense: DenseKernels, pool: KeyPool, chunk: Chunk, places: CachePlaces, cache: LayerCache
) -> None:
    """Store the keys of the blocks that a chunk completes, each in the row of its last token."""
    slots, _ = whole_blocks(places.segments, chunk.positions, pool.block, cache)
    if not len(slots):
        return
    keys, weights = np.split(rows_of_blocks(cache, slots), 2, axis=2)
    total = dense.pool_rows(np.ascontiguousarray(keys), np.ascontiguousarray(weights), pool.places)
    rows = np.concatenate((total, np.zeros_like(total)), axis=1)
    store_rows(cache, places, np.ascontiguousarray(slots[:, -1]), rows)


def _choose(
    dense: DenseKernels,
    asked: _Asked,
    chunk: Chunk,
    near: Sequence[int],
    cache: LayerCache,
    weights: LatentWeights,
) -> ChosenSlots:
    """Return what the tokens behind the near ones read."""
    rows: list[int] = []
    slots: list[IntArray] = []
    block, size = weights.block, cache.shape.block_tokens
    within = np.arange(block, dtype=np.int32)
    for segment, first in zip(chunk.places(window=False).segments, near, strict=True):
        table, end = segment.block_table, segment.start + segment.length
        for start in range(segment.start + first, end, SCORED_TOGETHER):
            part = slice(start, min(start + SCORED_TOGETHER, end))
            sees = (chunk.positions[part] + 1).tolist()
            scored = sees[-1] // block * block
            scores = dense.index_scores(
                asked.q[part], asked.weights[part], table, scored, cache, step=block
            )
            for count, said in zip(sees, scores, strict=True):
                whole = count // block
                chosen = best(said[:whole], weights.most_read // block) * np.int32(block)
                tail = np.arange(whole * block, count, dtype=np.int32)
                positions = np.concatenate(((chosen[:, None] + within).reshape(-1), tail))
                blocks, places = np.divmod(positions, size)
                slots.append(table[blocks] * np.int32(size) + places)
            rows += range(part.start, part.stop)
    return ChosenSlots(np.array(rows, np.int32), slots)


def _read_chosen(
    kernels: Kernels,
    weights: LatentWeights,
    choice: ChosenSlots,
    q: FloatArray,
    cache: LayerCache,
    values: FloatArray,
) -> None:
    """Write to the rows of values [T, heads, value_dim] that have a choice what they read there.

    Each token's slots are its blocks, of one token each. The arithmetic is that of decode steps.
    """
    shape, keys = row_by_row(cache.shape, cache.keys)
    single = LayerCache(shape, keys, np.empty(shape.value_shape, np.uint8))
    for start in range(0, len(choice.rows), _READ_TOGETHER):
        part = slice(start, start + _READ_TOGETHER)
        rows, slots = choice.rows[part], choice.slots[part]
        runs = [LoneToken(n, 1, each) for n, each in enumerate(slots)]
        positions = np.array([len(each) - 1 for each in slots], np.int32)
        values[rows] = _absorbed(kernels, weights, q[rows], positions, runs, single, prompt=False)
