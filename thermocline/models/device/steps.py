"""Plans a chunk's step on a device: its shape, and its positions and slots in one array. Pure.

A decode step has a row for each answer's newest token, and for each token that was drafted behind it
(`rows.py`). Its rows are padded to a power of two, and its block tables have room for the longest context. So decode
steps have a shape for each of these powers, whatever their contexts. Rows of padding write to places that no request has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.kernels.gpu.step import SpanShape, StepShape
from thermocline.models.device.rows import (
    as_rows,
    depths_of,
    is_by_rows,
    padded,
    row_states,
    state_rounds,
)
from thermocline.models.recurrent_layers import cut_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thermocline.kernels.weight import IntArray
    from thermocline.messages import Chunk, Segment


# Copies for branches are padded to a power of it: most trees need a dozen to a hundred.
_COPIES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """numbers: int64, in the order of `cut_inputs`: the first of shape.num_numbers, as far as they are read.

    begins: state slots, each with the slot to copy from, or None for a zero state. saves: copies (from, to) after each
    of the shape's delta spans.
    """

    shape: StepShape
    numbers: NDArray[np.int64]
    recurs: bool
    begins: tuple[tuple[int, int | None], ...] = ()
    saves: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SparePlaces:
    """Places in the cache for rows of padding: a block of layers with full attention, one of those with a window, and
    a slot of recurrent state.
    """

    block: int
    window_block: int
    state: int


@dataclass(frozen=True, slots=True)
class StepRules:
    """What all chunks of a model have in common.

    windows: the different attention windows in tokens, ascending, 0 for full attention. context_blocks: of the longest
    sequence. spare: None to pad no rows.
    """

    windows: tuple[int, ...]
    block_tokens: int
    context_blocks: int
    is_recurrent: bool
    spare: SparePlaces | None = None

    def table_width(self, window: int) -> int:
        """Return the blocks that a decoded token can see."""
        if not window:
            return self.context_blocks
        return min((window - 2 + self.block_tokens) // self.block_tokens + 1, self.context_blocks)


def plan_step(chunk: Chunk, rules: StepRules) -> StepPlan:
    """Return the step of a chunk. All decoded tokens form one span; each prompt sequence has its own."""
    together = is_by_rows(chunk)
    num_tokens = chunk.num_tokens
    num_rows = padded(num_tokens) if together and rules.spare is not None else num_tokens
    padding = num_rows - num_tokens
    plans = [
        _plan_window(chunk, window, rules, padding, together=together) for window in rules.windows
    ]
    parts: list[NDArray[np.integer]] = [_with_padding(chunk.positions, padding, 0)]
    for plan in plans:
        parts += [plan.slots, plan.copies.T.reshape(-1), *plan.firsts]
    delta: tuple[SpanShape, ...] = ()
    saves: tuple[tuple[tuple[int, int], ...], ...] = ()
    if rules.is_recurrent:
        delta, saves, slots = _delta(chunk, padding, rules, together=together)
        parts += slots
    parts.append(np.array([num_tokens]))
    for plan in reversed(plans):
        parts += [tables.T.reshape(-1) for tables in plan.tables]
    attention = tuple(tuple(plan.spans) for plan in plans)
    copies = tuple(len(plan.copies) for plan in plans)
    shape = StepShape(num_rows, chunk.is_prompt, rules.windows, attention, delta, copies)
    numbers = np.concatenate(parts).astype(np.int64)
    begins = _begins(chunk) if rules.is_recurrent else ()
    return StepPlan(shape, numbers, together, begins, saves)


class _WindowPlan(NamedTuple):
    """What layers with one window need: slots [rows], copies [n, 2], and for each span first positions and tables."""

    slots: NDArray[np.integer]
    copies: NDArray[np.integer]
    firsts: list[NDArray[np.integer]]
    tables: list[NDArray[np.integer]]
    spans: list[SpanShape]


def _plan_window(
    chunk: Chunk, window: int, rules: StepRules, padding: int, *, together: bool
) -> _WindowPlan:
    """Return a window's part of a step. The tables of full attention are cut behind the longest context."""
    slots, segments, copies = chunk.places(window=window > 0)
    spare = rules.spare or SparePlaces(0, 0, 0)
    is_apart = window > 0 and chunk.window_places is not None
    block = spare.window_block if is_apart else spare.block
    spare_slot = block * rules.block_tokens
    copied = _copies(copies, spare_slot if together and rules.spare is not None else None)
    plan = _WindowPlan(_with_padding(slots, padding, spare_slot), copied, [], [], [])
    for group in _groups(segments, together=together):
        tables, first = _tables(chunk, group, window, rules.block_tokens)
        needed = tables.shape[1]
        width = rules.table_width(window) if together else needed
        assert needed <= width, f"{needed} blocks of context in a table of {width}"
        rest = width - needed if window else 0
        plan.firsts.append(_with_padding(first, padding, 0))
        rows = np.full((padding, needed), block, np.int32)
        plan.tables.append(np.pad(np.concatenate((tables, rows)), ((0, 0), (0, rest))))
        length = group[0].length
        plan.spans.append(SpanShape(group[0].start, len(group) + padding, length, width))
    return plan


def _groups(segments: Sequence[Segment], *, together: bool) -> list[tuple[Segment, ...]]:
    """Return what forms a span. Each drafted row is a sequence, also beside tokens that are computed again."""
    if together:
        return [as_rows(segments)]
    return [as_rows((each,)) if each.num_drafted else (each,) for each in segments]


def _copies(copies: IntArray | None, spare_slot: int | None) -> NDArray[np.integer]:
    """Return copies [n, 2], padded with those of a slot to itself. spare_slot: None to pad none."""
    if copies is None:
        return np.zeros((0, 2), np.int32)
    if spare_slot is None:
        return copies
    count = 1
    while count < len(copies):
        count *= _COPIES
    return np.pad(copies, ((0, count - len(copies)), (0, 0)), constant_values=spare_slot)


def _with_padding(numbers: NDArray[np.integer], padding: int, value: int) -> NDArray[np.integer]:
    """Return the numbers of all rows: those of tokens, and `value` for each row of padding."""
    return np.append(numbers, np.full(padding, value, numbers.dtype)) if padding else numbers


def _tables(
    chunk: Chunk, group: Sequence[Segment], window: int, block_tokens: int
) -> tuple[IntArray, IntArray]:
    """Return tables [sequences, blocks of the longest] of what is seen, and the positions of their first tokens."""
    length = group[0].length
    starts = np.array([segment.start for segment in group])
    first_seen = chunk.positions[starts] - window + 1 if window else np.zeros_like(starts)
    first_blocks = np.maximum(first_seen, 0) // block_tokens
    ends = chunk.positions[starts + length - 1] // block_tokens + 1
    tables = np.zeros((len(group), int((ends - first_blocks).max())), np.int32)
    for row, segment, first, end in zip(
        tables, group, first_blocks.tolist(), ends.tolist(), strict=True
    ):
        row[: end - first] = segment.block_table[first:end]
    return tables, (first_blocks * block_tokens).astype(np.int32)


def _delta(
    chunk: Chunk, padding: int, rules: StepRules, *, together: bool
) -> tuple[
    tuple[SpanShape, ...], tuple[tuple[tuple[int, int], ...], ...], list[NDArray[np.integer]]
]:
    """Return a chunk's spans of recurrent layers, what is saved after each, and their numbers."""
    segments = chunk.places(window=False).segments
    spare = None if rules.spare is None else rules.spare.state
    if not any(segment.num_drafted for segment in segments):
        runs = cut_runs(chunk)
        spans, saves = _delta_spans(runs, padding, together=together)
        return spans, saves, [_with_padding(runs[:, 2], padding, spare or 0)]
    if together:
        spans, numbers = state_rounds(
            row_states(segments), depths_of(chunk), spare, chunk.num_tokens + padding
        )
        # Of answers beside it that have no draft: their own slot has the state after their only row.
        single = [each.state for each in segments if not each.num_drafted and each.state]
        saved = tuple((state.slot, target) for state in single for _, target in state.saves)
        return spans, (saved, *((),) * (len(spans) - 1)), numbers
    return _delta_beside_others(chunk, segments)


def _delta_beside_others(
    chunk: Chunk, segments: Sequence[Segment]
) -> tuple[
    tuple[SpanShape, ...], tuple[tuple[tuple[int, int], ...], ...], list[NDArray[np.integer]]
]:
    """The same of drafted rows beside tokens that are computed again: row by row, and run by run."""
    drafted = {row for each in segments if each.num_drafted for row in _rows_of(each)}
    spans, saves, numbers = [], [], []
    for start, length, slot, target in cut_runs(chunk).tolist():
        if start not in drafted:
            spans.append(SpanShape(start, 1, length))
            saves.append(((slot, target),) if target >= 0 else ())
            numbers.append(np.array([slot]))
    rows = [row for each in segments if each.num_drafted for row in _rows_of(each)]
    states = row_states(each for each in segments if each.num_drafted)
    for row, state in zip(rows, states, strict=True):
        spans.append(SpanShape(row, 1, 1, is_apart=True))
        saves.append(())
        numbers.append(np.array([*state, row]))
    return tuple(spans), tuple(saves), numbers


def _rows_of(segment: Segment) -> range:
    return range(segment.start, segment.start + segment.length)


def _delta_spans(
    runs: IntArray, padding: int, *, together: bool
) -> tuple[tuple[SpanShape, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """Return the spans of runs [n, 4], as `cut_runs` gives them, and what is saved after each."""
    saves = [((slot, target),) if target >= 0 else () for slot, target in runs[:, 2:].tolist()]
    if together:
        return (SpanShape(0, len(runs) + padding, 1),), (
            tuple(save for each in saves for save in each),
        )
    spans = tuple(SpanShape(start, 1, length) for start, length in runs[:, :2].tolist())
    return spans, tuple(saves)


def _begins(chunk: Chunk) -> tuple[tuple[int, int | None], ...]:
    begins: list[tuple[int, int | None]] = []
    for segment in chunk.segments:
        assert segment.state is not None, "a recurrent layer needs a state"
        if segment.state.load is not None:
            begins.append((segment.state.slot, segment.state.load))
        elif chunk.positions[segment.start] == 0:
            begins.append((segment.state.slot, None))
    return tuple(begins)
