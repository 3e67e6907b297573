"""Rows of a decode step that verify drafts, as a device takes them: each is a sequence of its own. Pure.

A row attends by the block table of its branch up to its own position. So it sees the rows before it on its way, whose keys
and values are stored first, and no others. Recurrent states go on row by row: the rows of one depth together, each from
the slot that has the state after its parent to one that keeps the state after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.kernels.gpu.step import SpanShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from thermocline.messages import Chunk, Segment


class RowStates(NamedTuple):
    """Slots of recurrent state: before a row, and after it."""

    before: int
    after: int


def is_by_rows(chunk: Chunk) -> bool:
    """Whether all of a chunk's tokens are newest known ones, and drafted ones behind them."""
    return not chunk.is_prompt and all(
        each.length == 1 + each.num_drafted for each in chunk.segments
    )


def as_rows(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return a segment for each row of these segments, with the block table of its branch."""
    return tuple(
        segment if segment.length == 1 else segment._replace(start=segment.start + n, length=1)
        for segment in segments
        for n in range(segment.length)
    )


def row_states(segments: Iterable[Segment]) -> list[RowStates]:
    """Return the slots of each row of drafted segments, or of single tokens, in order.

    The state after each row but a segment's last is saved; the last one's is what the segment's slot has.
    """
    found = []
    for segment in segments:
        state = segment.state
        assert state is not None, "a recurrent layer needs a state"
        # A request's own branch has begun when the step runs. Others go on from what their parent left.
        before = state.load if segment.level and state.load is not None else state.slot
        saves = dict(state.saves)
        for length in range(1, segment.length + 1):
            after = state.slot if length == segment.length else saves[length]
            found.append(RowStates(before, after))
            before = after
    return found


def depths_of(chunk: Chunk) -> NDArray[np.integer]:
    """Return how far each row is behind its request's newest known token."""
    bases = [chunk.positions[each.start] for each in chunk.segments]
    behind: NDArray[np.integer] = chunk.positions - np.repeat(
        bases, [each.length for each in chunk.segments]
    )
    return behind


def state_rounds(
    states: Sequence[RowStates], depths: NDArray[np.integer], spare: int | None, num_rows: int
) -> tuple[tuple[SpanShape, ...], list[NDArray[np.integer]]]:
    """Return a span apart for each depth, and the numbers of all: slots before, slots after, rows.

    spare: a slot that no request has; with one both counts are padded to powers of two, so that there are few shapes.
    num_rows: of the step, which is the row of nobody.
    """
    by_depth = [np.flatnonzero(depths == depth) for depth in range(int(depths.max()) + 1)]
    count, width = len(by_depth), max(map(len, by_depth))
    if spare is not None:
        count, width = padded(count), padded(width)
        by_depth += [np.zeros(0, np.intp)] * (count - len(by_depth))
    spans, numbers = [], []
    for rows in by_depth:
        size = len(rows) if spare is None else width
        slots = np.full((3, size), spare or 0)
        slots[2] = num_rows
        slots[2, : len(rows)] = rows
        for place, row in enumerate(rows.tolist()):
            slots[:2, place] = states[row]
        spans.append(SpanShape(0, size, 1, is_apart=True))
        numbers.append(slots.reshape(-1))
    return tuple(spans), numbers


def padded(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()
