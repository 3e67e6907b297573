"""Puts runs of tokens together to one chunk: positions, cache slots, and the rows that want logits.

Pure; decides nothing about which tokens they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.messages import Chunk, ChunkId, Segment, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import StateUse
    from thermocline.pipeline.requests import Request


class Run(NamedTuple):
    """Tokens [start, end) of a request, of whose last `num_logits` are wanted."""

    request: Request
    start: int
    end: int
    num_logits: int
    state: StateUse | None = None


def build_chunk(chunk: ChunkId, kind: SegmentKind, runs: Sequence[Run], block_tokens: int) -> Chunk:
    """Return the chunk of these runs, one segment each, in their order."""
    segments = []
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_rows: list[int] = []
    for request, start, end, num_logits, state in runs:
        row, length, blocks = len(token_ids), end - start, request.blocks
        table = request.table[: len(blocks)]
        segments.append(Segment(request.id, row, length, kind, table, num_logits, state))
        token_ids += request.known[start:end]
        for position in range(start, end):
            positions.append(position)
            slots.append(blocks[position // block_tokens] * block_tokens + position % block_tokens)
        logits_rows += range(row + length - num_logits, row + length)
    return Chunk(
        chunk,
        tuple(segments),
        np.array(token_ids, np.int32),
        np.array(positions, np.int32),
        np.array(slots, np.int32),
        np.array(logits_rows, np.int32),
        any(run.request.wants_routing for run in runs),
    )
