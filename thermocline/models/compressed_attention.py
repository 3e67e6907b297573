"""Attention to a window of rows and to entries, each made of many tokens' rows, made of kernels.

A sequence's last rows, and what entries will be made of, are a recurrent state; entries are cached where their last token is.
A token reads its window and the entries that are complete by then, or those that an indexer chooses of them. Every token is
treated by itself, so that results do not depend on the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.kernels.cache_format import CacheShape, CacheType
from thermocline.kernels.dense_contract import Attending, HeadNorm, LayerCache, RopeTable
from thermocline.kernels.entries import EntryCache, cache_of_rows
from thermocline.models.choosing import SCORED_TOGETHER, LoneToken, best, turn_heads
from thermocline.models.layers import copy_for_branches
from thermocline.models.recurrent_layers import run_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thermocline.kernels.compressed_weights import CompressedWeights, Compressor, EntryIndexer
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.recurrent_contract import RecurrentStates
    from thermocline.kernels.weight import ByteArray, FloatArray, IntArray, Weight
    from thermocline.messages import CachePlaces, Chunk, Segment

_READ_TOGETHER: Final = 128
"""Tokens whose lists of rows are in memory at a time."""


class CompressedCache(NamedTuple):
    """Where a layer keeps what it needs of earlier tokens. entries: None in a layer without."""

    type: CacheType
    entries: LayerCache | None
    states: RecurrentStates


class Turns(NamedTuple):
    """Rotary embedding of the last numbers of heads: at a chunk's positions, and at any others."""

    here: RopeTable
    at: Callable[[IntArray], RopeTable]


class _Run(NamedTuple):
    """Tokens of one sequence. first: their first row in the chunk; start: its position. rows: uint8 [window + tokens, bytes],
    those of the window before them, each where its position leaves the rest, and their own."""

    first: int
    start: int
    table: IntArray
    rows: ByteArray

    def num_tokens(self, window: int) -> int:
        """Return how many there are."""
        return len(self.rows) - window


class _Memory:
    """Rows that are read together, part by part."""

    def __init__(self) -> None:
        self.parts: list[ByteArray] = []
        self._count = 0

    def add(self, rows: ByteArray) -> int:
        """Add rows [n, bytes]; return where the first of them is."""
        first = self._count
        self.parts.append(rows)
        self._count += len(rows)
        return first


class _Asked(NamedTuple):
    """What a chunk's tokens ask: of rows, and of an indexer. q: float32 [T, heads, dim]; of_index: [T, heads, index] and
    weights [T, heads], None in layers without an indexer.
    """

    q: FloatArray
    of_index: tuple[FloatArray, FloatArray] | None


def attend_compressed(
    kernels: Kernels,
    weights: CompressedWeights,
    turns: Turns,
    chunk: Chunk,
    normed: FloatArray,
    cache: CompressedCache,
) -> FloatArray:
    """Return what a layer's attention gives of its normed input [T, hidden]; updates the states of the chunk's sequences."""
    dense, prompt, dim = kernels.dense, chunk.is_prompt, len(weights.kv_gain)
    products = (weights.low.weight, weights.kv, *_projections(weights))
    low, row, *fresh = kernels.multiply_all(products, normed, prompt=prompt)
    ranked = dense.rms_norm(low, weights.low.gain, weights.epsilon)
    q = kernels.matmul(weights.q, ranked, prompt=prompt).reshape(len(row), -1, dim)
    turn = _widened(turns.here, dim)
    rows = _turned_rows(dense, weights, q, row, turn, cache.type)
    index = None
    if weights.indexer is not None:
        index = _ask(kernels, weights.indexer, (normed, ranked), turns.here, prompt=prompt)
    asked = _Asked(q, index)
    places, values = chunk.places(window=False), np.empty_like(q)
    entries = None
    if cache.entries is not None and weights.compressor is not None:
        copy_for_branches(cache.entries, places)
        entries = EntryCache(cache.entries, weights.compressor.ratio)
    made_of = np.concatenate(fresh, axis=1) if fresh else row[:, :0]
    for each in run_rounds(chunk, cache.states):
        runs = []
        for first, count, slot in each.tolist():
            part = slice(first, first + count)
            start, table = int(chunk.positions[first]), _table_of(places.segments, first)
            before = _window(weights, cache, slot)
            runs.append(_Run(first, start, table, np.concatenate((before, rows[part]))))
            _keep(before, rows[part], start)
            if entries is not None:
                kept = cache.states.recurrent[slot, 0]
                made = _entries(dense, weights, turns.at, kept, made_of[part], start)
                _store(entries, made, table, places)
                _keep(kept, made_of[part], start)
        _read(dense, weights, runs, entries, asked, cache.type, values)
    back = RopeTable(turn.cosines, -turn.sines, pairs=True)
    turn_heads(dense, values, back)
    grouped = values.reshape(len(q), len(weights.groups), -1)
    return kernels.matmul(
        weights.output,
        kernels.multiply_heads(weights.groups, grouped).reshape(len(q), -1),
        prompt=prompt,
    )


def _compressors(weights: CompressedWeights) -> list[Compressor]:
    """Return those of a layer: of its entries, and of its indexer's."""
    own = [weights.compressor] if weights.compressor is not None else []
    return own if weights.indexer is None else [*own, weights.indexer.compressor]


def _projections(weights: CompressedWeights) -> Iterator[Weight]:
    for compressor in _compressors(weights):
        yield compressor.kv
        yield compressor.gate


def _widened(rope: RopeTable, dim: int) -> RopeTable:
    """Return the table of the last numbers of a head as one of all `dim` numbers, of which the others stay."""
    tokens, turned = rope.cosines.shape
    still = (tokens, dim // 2 - turned)
    cosines = np.concatenate((np.ones(still, np.float32), rope.cosines), axis=1)
    return RopeTable(
        cosines, np.concatenate((np.zeros(still, np.float32), rope.sines), axis=1), pairs=True
    )


def _turned_rows(
    dense: DenseKernels,
    weights: CompressedWeights,
    q: FloatArray,
    row: FloatArray,
    turn: RopeTable,
    cache_type: CacheType,
) -> ByteArray:
    """Norm and turn q [T, heads, dim] in place; return the rows [T, dim] so, in the cache's type: uint8 [T, bytes]."""
    tokens, dim = row.shape
    # Of single tokens, a cache's keys lie as rows of latent caches do.
    shape = CacheShape(cache_type, tokens, 1, 1, dim)
    keys, unused = (np.empty(each, np.uint8) for each in (shape.array_shape, shape.value_shape))
    norm = HeadNorm(np.ones(dim, np.float32), weights.kv_gain, weights.epsilon)
    slots, head = np.arange(tokens, dtype=np.int32), row[:, None]
    dense.prepare_heads(q, head, head, norm, turn, LayerCache(shape, keys, unused), slots)
    return keys.reshape(tokens, -1)


def _ask(
    kernels: Kernels,
    indexer: EntryIndexer,
    inputs: tuple[FloatArray, FloatArray],
    rope: RopeTable,
    *,
    prompt: bool,
) -> tuple[FloatArray, FloatArray]:
    """Return queries [T, heads, index] and weights [T, heads]. inputs: the normed input [T, hidden], and what queries are made of [T, rank]."""
    normed, ranked = inputs
    dim = indexer.compressor.dim
    q = kernels.matmul(indexer.q, ranked, prompt=prompt).reshape(len(ranked), -1, dim)
    turn_heads(kernels.dense, q, _widened(rope, dim))
    said = kernels.matmul(indexer.weights, normed) * np.float32(indexer.scale)
    return q, said


def _table_of(segments: Sequence[Segment], row: int) -> IntArray:
    """Return the blocks of the sequence that a row of a chunk belongs to."""
    return next(
        each.block_table for each in segments if each.start <= row < each.start + each.length
    )


def _window(weights: CompressedWeights, cache: CompressedCache, slot: int) -> ByteArray:
    """Return a view of a sequence's last rows: uint8 [window, bytes of a row], in the memory of floats."""
    row_bytes = cache.type.row_bytes(len(weights.kv_gain))
    memory = cache.states.conv[slot].reshape(-1).view(np.uint8)
    window: ByteArray = memory[: weights.window * row_bytes].reshape(weights.window, row_bytes)
    return window


def _keep(kept: FloatArray | ByteArray, rows: FloatArray | ByteArray, start: int) -> None:
    """Keep the last of rows [n, width] whose first position is `start`, each where its position leaves the rest."""
    last = rows[-len(kept) :]
    first = start + len(rows) - len(last)
    kept[np.arange(first, first + len(last)) % len(kept)] = last


def _entries(
    dense: DenseKernels,
    weights: CompressedWeights,
    turns_at: Callable[[IntArray], RopeTable],
    kept: FloatArray,
    fresh: FloatArray,
    start: int,
) -> tuple[IntArray, list[FloatArray]]:
    """Return the numbers of the entries that a run completes, int32 [n], and those entries, float32 [n, dim] of each kind.

    kept: what they are made of of earlier tokens, each where its position leaves the rest; fresh: of the run's.
    """
    compressors = _compressors(weights)
    ratio, series = compressors[0].ratio, compressors[0].series
    numbers = np.arange(start // ratio, (start + len(fresh)) // ratio, dtype=np.int32)
    if not len(numbers):
        return numbers, []
    positions = (numbers[:, None] - (series - 1)) * ratio + np.arange(series * ratio)
    every = np.concatenate((kept, fresh))
    is_fresh = positions >= start
    found = every[np.where(is_fresh, len(kept) + positions - start, positions % len(kept))]
    rope, column, made = turns_at(numbers * np.int32(ratio)), 0, []
    for each in compressors:
        width, dim = each.places.shape[1], each.dim
        rows, gates = (
            _in_series(found[..., column + n * width : column + (n + 1) * width], ratio, dim)
            for n in range(2)
        )
        gates[positions < 0] = -np.inf
        own = _in_series(np.concatenate([each.places] * series)[None], ratio, dim)[0]
        pooled = dense.pool_rows(rows, gates, own)[:, None]
        turn_heads(dense, pooled, _widened(rope, dim), each.gain, weights.epsilon)
        made.append(pooled[:, 0])
        column += 2 * width
    return numbers, made


def _in_series(found: FloatArray, ratio: int, dim: int) -> FloatArray:
    """Return each token's numbers of the series that its entry is made of, a copy: [n, tokens, dim] of [n, tokens, series * dim]."""
    parts = [
        found[:, n * ratio : (n + 1) * ratio, n * dim : (n + 1) * dim]
        for n in range(found.shape[2] // dim)
    ]
    return np.concatenate(parts, axis=1)


def _store(
    entries: EntryCache,
    made: tuple[IntArray, list[FloatArray]],
    table: IntArray,
    places: CachePlaces,
) -> None:
    """Store a run's entries, and where else branches look for them."""
    numbers, rows = made
    if not len(numbers):
        return
    last = entries.last_slots(table, numbers)
    which = np.arange(len(last))
    if places.copies is not None:
        matches, more = np.nonzero(last[:, None] == places.copies[:, 0])
        which = np.concatenate((which, matches))
        last = np.concatenate((last, places.copies[more, 1]))
    entries.store(entries.slots_of(last), *(each[which] for each in rows))


def _read(
    dense: DenseKernels,
    weights: CompressedWeights,
    runs: Sequence[_Run],
    entries: EntryCache | None,
    asked: _Asked,
    cache_type: CacheType,
    values: FloatArray,
) -> None:
    """Write to values [T, heads, dim] what the tokens of some runs read, all in one memory of rows.

    The arithmetic is that of decode steps.
    """
    dim, memory, lists = len(weights.kv_gain), _Memory(), []
    for run in runs:
        lists += _rows_read(dense, weights, run, entries, asked, memory)
    cache = cache_of_rows(cache_type, np.concatenate(memory.parts), dim)
    rule = Attending(weights.scale, sinks=weights.sinks)
    firsts = [(run.first, run.num_tokens(weights.window)) for run in runs]
    tokens = np.concatenate([np.arange(first, first + count) for first, count in firsts])
    for start in range(0, len(tokens), _READ_TOGETHER):
        part = slice(start, start + _READ_TOGETHER)
        rows, tables = _as_slice(tokens[part]), lists[part]
        each = [LoneToken(n, 1, table) for n, table in enumerate(tables)]
        last = np.array([len(table) - 1 for table in tables], np.int32)
        values[rows] = dense.attention(asked.q[rows], last, each, cache, rule)


def _as_slice(rows: IntArray) -> IntArray | slice:
    """Return rows that follow each other as a slice, so that nothing of them is copied."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else rows


def _rows_read(
    dense: DenseKernels,
    weights: CompressedWeights,
    run: _Run,
    entries: EntryCache | None,
    asked: _Asked,
    memory: _Memory,
) -> list[IntArray]:
    """Return which rows of the memory each token of a run reads, entries first, and add those rows to it."""
    window = weights.window
    near = _rows_of_window(run, window) + np.int32(memory.add(run.rows))
    wanted = _wanted(dense, weights, run, entries, asked)
    if entries is not None:
        is_used = np.zeros(max(int(each[-1]) + 1 if len(each) else 0 for each in wanted), bool)
        for each in wanted:
            is_used[each] = True
        used = np.flatnonzero(is_used).astype(np.int32)
        rows = entries.rows(entries.slots(run.table, used), len(weights.kv_gain))
        place_of = np.cumsum(is_used, dtype=np.int32) + np.int32(memory.add(rows) - 1)
        wanted = [place_of[each] for each in wanted]
    # Of the first tokens the window reaches before the sequence.
    lacks = [max(0, window - 1 - run.start - number) for number in range(len(wanted))]
    return [
        np.concatenate((far, near[number + lack : number + window]))
        for number, (far, lack) in enumerate(zip(wanted, lacks, strict=True))
    ]


def _rows_of_window(run: _Run, window: int) -> IntArray:
    """Return which of a run's rows each position has, from the window of its first token to its last token: int32."""
    positions = np.arange(run.start - window + 1, run.start + len(run.rows) - window)
    own = positions >= run.start
    rows: IntArray = np.where(own, window + positions - run.start, positions % window)
    return rows.astype(np.int32)


def _wanted(
    dense: DenseKernels,
    weights: CompressedWeights,
    run: _Run,
    entries: EntryCache | None,
    asked: _Asked,
) -> list[IntArray]:
    """Return the numbers of the entries that each token of a run reads, ascending."""
    count = run.num_tokens(weights.window)
    if entries is None or weights.compressor is None:
        return [np.empty(0, np.int32)] * count
    complete = (run.start + np.arange(count) + 1) // weights.compressor.ratio
    if weights.indexer is None or asked.of_index is None:
        return [np.arange(n, dtype=np.int32) for n in complete.tolist()]
    most = weights.indexer.most_read
    # Positions ascend: those that see too many entries are the last ones.
    near = count - np.count_nonzero(complete > most)
    found = [np.arange(n, dtype=np.int32) for n in complete[:near].tolist()]
    for start in range(near, count, SCORED_TOGETHER):
        part = slice(run.first + start, run.first + min(start + SCORED_TOGETHER, count))
        counts = complete[start : start + SCORED_TOGETHER].tolist()
        q, said = (each[part] for each in asked.of_index)
        scores = entries.scores(dense, (q, said), run.table, counts[-1])
        found += [best(row[:n], most) for n, row in zip(counts, scores, strict=True)]
    return found
