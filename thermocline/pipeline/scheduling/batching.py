"""Builds a chunk from runs of tokens: positions, cache slots, and the rows whose logits are wanted.

Pure. The scheduler decides which tokens they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.messages import CachePlaces, Chunk, ChunkId, Segment, SegmentKind
from thermocline.pipeline.scheduling.draft_trees import copies_of
from thermocline.pipeline.scheduling.forks import slot_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.messages import IntArray, RequestId, StateUse
    from thermocline.pipeline.scheduling.draft_trees import TreeRun
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_windows import WindowBlocks


class Run(NamedTuple):
    """Tokens [start, end) of a request, and `drafted` ones behind them.

    The last `num_logits` of all need logits, the last `num_states` hidden states. tree: of drafted tokens that are no chain.
    """

    request: Request
    start: int
    end: int
    num_logits: int
    state: StateUse | None = None
    num_states: int = 0
    drafted: tuple[int, ...] = ()
    tree: TreeRun | None = None

    @property
    def positions(self) -> Sequence[int]:
        """Of its tokens and the drafted ones."""
        if self.tree is None:
            return range(self.start, self.end + len(self.drafted))
        return [self.start + depth for depth in self.tree.shape.depths]


def build_chunk(
    chunk: ChunkId,
    kind: SegmentKind,
    runs: Sequence[Run],
    block_tokens: int,
    windows: Mapping[RequestId, WindowBlocks] | None,
) -> Chunk:
    """Return the chunk of these runs, one segment each, in their order."""
    segments: list[Segment] = []
    token_ids: list[int] = []
    positions: list[int] = []
    logits_rows: list[int] = []
    states_rows: list[int] = []
    for run in runs:
        request, start, end, num_logits, state, num_states, drafted, _ = run
        row, table = len(token_ids), request.cache.table[: len(request.cache.blocks)]
        num_expanded = max(0, min(end, request.cache.num_expanded) - start)
        length = end - start + len(drafted)
        segment = Segment(
            *(request.id, row, length, kind, table, num_logits, state, num_states, num_expanded),
            num_drafted=len(drafted),
        )
        segments.append(segment)
        token_ids += request.known[start:end]
        token_ids += drafted
        positions += run.positions
        logits_rows += range(len(token_ids) - num_logits, len(token_ids))
        states_rows += range(len(token_ids) - num_states, len(token_ids))
    own, window_places = _places(segments, runs, block_tokens, windows)
    return Chunk(
        chunk,
        tuple(segments),
        np.array(token_ids, np.int32),
        np.array(positions, np.int32),
        own.slots,
        np.array(logits_rows, np.int32),
        any(run.request.options.wants_routing for run in runs),
        window_places,
        np.array(states_rows, np.int32) if states_rows else None,
        own if any(run.tree for run in runs) else None,
    )


def _places(
    segments: Sequence[Segment],
    runs: Sequence[Run],
    size: int,
    windows: Mapping[RequestId, WindowBlocks] | None,
) -> tuple[CachePlaces, CachePlaces | None]:
    """Return where the tokens of layers that keep all of them lie, and those of layers with a window, if that is elsewhere."""
    own, window = _Places(), _Places()
    for segment, run in zip(segments, runs, strict=True):
        blocks = run.request.cache.blocks
        held = None if windows is None else windows[run.request.id]
        if run.tree is not None:
            tables = run.tree.tables(
                segment.block_table, None if held is None else held.window_table[: len(blocks)]
            )
            own.add_tree(segment, run, [table for table, _ in tables], size)
            if held is not None:
                window.add_tree(segment, run, [table for _, table in tables], size)
            continue
        own.segments.append(segment)
        own.slots += [blocks[at // size] * size + at % size for at in run.positions]
        if held is not None:
            table = held.window_table[: len(blocks)]
            mine, passed = held.window_blocks, held.num_passed
            window.segments.append(segment._replace(block_table=table))
            window.slots += [mine[at // size - passed] * size + at % size for at in run.positions]
    return own.made(), None if windows is None else window.made()


class _Places:
    """Collects a chunk's places in one kind of layer."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.slots: list[int] = []
        self._copies: list[tuple[int, int]] = []

    def add_tree(self, segment: Segment, run: Run, tables: Sequence[IntArray], size: int) -> None:
        """Add a segment for each branch of a run. tables: by branch."""
        tree, positions = run.tree, run.positions
        assert tree is not None, "it has branches"
        for number, branch in enumerate(tree.shape.branches):
            rows = range(branch.first_row, branch.first_row + branch.length)
            self.slots += [slot_of(tables[number], positions[row], size) for row in rows]
            self.segments.append(
                segment._replace(
                    start=segment.start + branch.first_row,
                    length=branch.length,
                    block_table=tables[number],
                    state=tree.states[number] if tree.states else None,
                    level=branch.level,
                )
            )
        self._copies += copies_of(tree, tables, run.start, size)

    def made(self) -> CachePlaces:
        """Return all of it."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2) if self._copies else None
        return CachePlaces(np.array(self.slots, np.int32), tuple(self.segments), copies)
