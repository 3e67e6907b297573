"""Builds a chunk from runs of tokens: positions, cache slots, and the rows whose logits are wanted.

Pure. The scheduler decides which tokens they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.messages import CachePlaces, Chunk, ChunkId, Segment, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.messages import RequestId, StateUse
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_windows import WindowBlocks


class Run(NamedTuple):
    """Tokens [start, end) of a request, and `drafted` ones behind them.

    The last `num_logits` of all need logits, the last `num_states` hidden states.
    """

    request: Request
    start: int
    end: int
    num_logits: int
    state: StateUse | None = None
    num_states: int = 0
    drafted: tuple[int, ...] = ()


def build_chunk(
    chunk: ChunkId,
    kind: SegmentKind,
    runs: Sequence[Run],
    block_tokens: int,
    windows: Mapping[RequestId, WindowBlocks] | None,
) -> Chunk:
    """Return the chunk of these runs, one segment each, in their order."""
    segments: list[Segment] = []
    window_segments: list[Segment] = []
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    window_slots: list[int] = []
    logits_rows: list[int] = []
    states_rows: list[int] = []
    size = block_tokens
    for request, start, end, num_logits, state, num_states, drafted in runs:
        row, blocks, run = len(token_ids), request.cache.blocks, range(start, end + len(drafted))
        table = request.cache.table[: len(blocks)]
        num_expanded = max(0, min(end, request.cache.num_expanded) - start)
        segment = Segment(
            *(request.id, row, len(run), kind, table, num_logits, state, num_states, num_expanded),
            num_drafted=len(drafted),
        )
        segments.append(segment)
        token_ids += request.known[start:end]
        token_ids += drafted
        positions += run
        slots += [blocks[at // size] * size + at % size for at in run]
        logits_rows += range(len(token_ids) - num_logits, len(token_ids))
        states_rows += range(len(token_ids) - num_states, len(token_ids))
        if windows is not None:
            held = windows[request.id]
            blocks, passed = held.window_blocks, held.num_passed
            table = held.window_table[: len(table)]
            window_segments.append(segment._replace(block_table=table))
            window_slots += [blocks[at // size - passed] * size + at % size for at in run]
    window_places = None
    if windows is not None:
        window_places = CachePlaces(np.array(window_slots, np.int32), tuple(window_segments))
    return Chunk(
        chunk,
        tuple(segments),
        np.array(token_ids, np.int32),
        np.array(positions, np.int32),
        np.array(slots, np.int32),
        np.array(logits_rows, np.int32),
        any(run.request.options.wants_routing for run in runs),
        window_places,
        np.array(states_rows, np.int32) if states_rows else None,
    )
