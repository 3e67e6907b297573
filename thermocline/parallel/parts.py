"""Which rows of a chunk each rank of a replica computes, and what it needs of the others' in a layer. Pure.

A row's results do not depend on which rows are computed beside it, so any division gives the same bits. What a row sees
of others is in the cache, or in a state that all rows move on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.messages import CachePlaces, Chunk, ChunkId, RequestId, Segment, SegmentKind
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.kernels.cache_format import CacheType
    from thermocline.messages import IntArray
    from thermocline.models.spec import ModelSpec

MIN_DIVIDED_TOKENS: Final = 32
"""Of a prompt's chunk. With 16 the gain was within the noise, with 32 up to a seventh, with 64 a sixth (docs/LOG.md)."""

_FLOAT_BYTES: Final = 4


class Mixing(Enum):
    """What ranks of one replica give each other in a layer, before its rows are computed to the end."""

    NOTHING = "nothing"
    """No row sees another one, or by another layer's cache alone."""
    CACHE = "cache"
    """The keys and values of their rows."""
    WINDOW_CACHE = "window cache"
    """The same, in a layer with a sliding window, whose cache has places of its own."""
    HIDDEN = "hidden"
    """The residual stream of their rows: each computes all of them, as a state moves on with every token.

    So do layers that choose positions in blocks, or read entries: those of a block are made when all its tokens are there.
    """


def mixing_of(spec: ModelSpec) -> tuple[Mixing, ...]:
    """Return by layer what ranks of one replica give each other."""
    has_blocks = spec.entries is not None or (
        spec.indexer is not None and spec.indexer.block > 1 and not spec.indexer.by_head
    )
    found = {
        LayerKind.ATTENTION: Mixing.HIDDEN if has_blocks else Mixing.CACHE,
        LayerKind.WINDOW: Mixing.WINDOW_CACHE,
        LayerKind.RECURRENT: Mixing.HIDDEN,
        LayerKind.NONE: Mixing.NOTHING,
    }
    return tuple(
        Mixing.NOTHING if layer in spec.kv_sources else found[kind]
        for layer, kind in enumerate(spec.layer_kinds)
    )


def mixed_row_bytes(spec: ModelSpec, cache_type: CacheType) -> int:
    """Return the most bytes of a row that a rank gives another one of its replica in a layer."""
    row_bytes = {
        Mixing.NOTHING: [0] * spec.num_layers,
        Mixing.HIDDEN: [_FLOAT_BYTES * spec.stream_size] * spec.num_layers,
    }
    cached = [shape.token_bytes(cache_type) for shape in spec.kv_shapes]
    return max(row_bytes.get(kind, cached)[n] for n, kind in enumerate(mixing_of(spec)))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChunkPart(Chunk):
    """The rows of a chunk that one rank computes: a chunk for every stage but those that need the others' rows.

    rows: of `whole`. bounds: where each rank's rows begin, and the end of the last one's. index: of this rank among its
    replica's.
    """

    whole: Chunk
    bounds: tuple[int, ...]
    index: int

    @property
    def rows(self) -> slice:
        """This rank's rows of the whole chunk."""
        return slice(self.bounds[self.index], self.bounds[self.index + 1])

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Those of the whole chunk: the cache has all its rows afterwards, and states move on with them."""
        return self.whole.requests

    def slots_of(self, index: int, *, window: bool) -> IntArray:
        """Return where a rank's rows are in a layer's cache: int32 [rows of that rank]."""
        return self.whole.places(window=window).slots[self.bounds[index] : self.bounds[index + 1]]


def is_divided(chunk: Chunk, num_ranks: int) -> bool:
    """Whether a replica's ranks divide a chunk: a prompt's, of enough tokens.

    Not one whose routing is asked for, which the first rank notes, and no tree of drafted tokens.
    """
    return (
        num_ranks > 1
        and chunk.is_prompt
        and not chunk.wants_routing
        and not chunk.has_branches
        and chunk.num_tokens >= max(MIN_DIVIDED_TOKENS, num_ranks)
    )


def bounds_of(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Return where each rank's rows begin, and the end: sizes differ by one at most."""
    return tuple(num_tokens * index // num_ranks for index in range(num_ranks + 1))


def part_of(chunk: Chunk, num_ranks: int, index: int) -> ChunkPart:
    """Return the rows of a chunk of so many tokens, or more, that a rank computes. index: its own in the replica."""
    bounds = bounds_of(chunk.num_tokens, num_ranks)
    first, end = bounds[index], bounds[index + 1]
    window = chunk.window_places
    if window is not None:
        window = CachePlaces(window.slots[first:end], _cut(window.segments, first, end))
    states = chunk.states_rows
    own = {field.name: getattr(chunk, field.name) for field in fields(Chunk)}
    own |= {
        "segments": _cut(chunk.segments, first, end),
        "token_ids": chunk.token_ids[first:end],
        "positions": chunk.positions[first:end],
        "kv_slots": chunk.kv_slots[first:end],
        "logits_rows": _rows_within(chunk.logits_rows, first, end),
        "window_places": window,
        "states_rows": None if states is None else _rows_within(states, first, end),
    }
    return ChunkPart(**own, whole=chunk, bounds=bounds, index=index)


def nobodys_chunk(*, is_prompt: bool) -> Chunk:
    """Return what stands in the trace for the chunk of a rank that has none."""
    none = np.empty(0, np.int32)
    kind = SegmentKind.PROMPT if is_prompt else SegmentKind.DECODE
    segment = Segment(RequestId(0), 0, 0, kind, none)
    return Chunk(ChunkId(-1), (segment,), none, none, none, none)


def _rows_within(rows: IntArray, first: int, end: int) -> IntArray:
    own: IntArray = rows[(rows >= first) & (rows < end)] - first
    return own.astype(rows.dtype, copy=False)


def _cut(segments: Iterable[Segment], first: int, end: int) -> tuple[Segment, ...]:
    """Return the segments' tokens within some rows, by rows from there on."""
    found = []
    for segment in segments:
        start, stop = max(segment.start, first), min(segment.start + segment.length, end)
        if start < stop:
            skipped, length = start - segment.start, stop - start
            expanded = min(max(segment.num_expanded - skipped, 0), length)
            found.append(
                segment._replace(start=start - first, length=length, num_expanded=expanded)
            )
    return tuple(found)
