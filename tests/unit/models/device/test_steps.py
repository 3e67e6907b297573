"""Chunks as a device takes them: spans, tables and state slots, for any mix of sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.kernels.gpu.step import StepInputs, cut_inputs
from thermocline.messages import (
    CachePlaces,
    Chunk,
    ChunkId,
    RequestId,
    Segment,
    SegmentKind,
    StateUse,
)
from thermocline.models.device.steps import SparePlaces, StepPlan, StepRules, plan_step

BLOCK, CONTEXT_BLOCKS = 8, 64


def chunk_of(sequences, kind=SegmentKind.PROMPT, states=None, window_offset=0) -> Chunk:
    """Return a chunk of (first position, length) per sequence; block b of sequence s is 100 * s + b."""
    segments, windows, positions, slots, row = [], [], [], [], 0
    for number, (start, length) in enumerate(sequences):
        num_blocks = (start + length - 1) // BLOCK + 1
        table = np.arange(num_blocks, dtype=np.int32) + 100 * number
        state = states and states[number]
        segment = Segment(RequestId(number), row, length, kind, table, 0, state)
        segments.append(segment)
        windows.append(segment._replace(block_table=table + window_offset))
        at = np.arange(start, start + length, dtype=np.int32)
        positions.append(at)
        slots.append(table[at // BLOCK] * BLOCK + at % BLOCK)
        row += length
    all_slots = np.concatenate(slots)
    places = CachePlaces(all_slots + window_offset * BLOCK, tuple(windows))
    return Chunk(
        ChunkId(1),
        tuple(segments),
        np.zeros(row, np.int32),
        np.concatenate(positions),
        all_slots,
        np.zeros(0, np.int32),
        window_places=places if window_offset else None,
    )


def rules_of(*windows: int, is_recurrent: bool = False, spare=None) -> StepRules:
    return StepRules(windows, BLOCK, CONTEXT_BLOCKS, is_recurrent, spare)


def inputs_of(plan: StepPlan) -> StepInputs:
    """Return the step's numbers, cut; -1 where the plan leaves what was there."""
    numbers = np.full(plan.shape.num_numbers, -1)
    numbers[: len(plan.numbers)] = plan.numbers
    return cut_inputs(plan.shape, torch.from_numpy(numbers))


SEQUENCES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(SEQUENCES, st.sampled_from([0, 1, 7, 8, 64]), st.booleans())
def test_every_row_finds_all_that_it_sees(sequences, window, decode):
    """Each visible position lies where the span's table says, and no other row's table is touched."""
    if decode:
        sequences = [(start, 1) for start, _ in sequences]
    kind = SegmentKind.DECODE if decode else SegmentKind.PROMPT
    chunk = chunk_of(sequences, kind)
    plan = plan_step(chunk, rules_of(window))
    assert plan.recurs == decode
    assert decode or len(plan.numbers) == plan.shape.num_numbers
    row = 0
    for span in inputs_of(plan).attention[window].spans:
        assert span.shape.start == row
        for table, first in zip(span.tables.numpy(), span.first.tolist(), strict=True):
            segment = next(s for s in chunk.segments if s.start == row)
            for position in chunk.positions[row : row + span.shape.length]:
                oldest = max(0, position - window + 1) if window else 0
                seen = np.arange(oldest, position + 1)
                assert first <= oldest
                expected = segment.block_table[seen // BLOCK]
                np.testing.assert_array_equal(table[(seen - first) // BLOCK], expected)
            row += span.shape.length
    assert row == chunk.num_tokens


@pytest.mark.parametrize("windows", [(0,), (0, 5, 8, 9), (1,)])
def test_steps_of_answers_have_one_shape_whatever_their_contexts(windows):
    """Contexts grow over borders of blocks and differ within a step: the shape is the batch's alone."""
    shapes, lengths = set(), []
    for position in range(CONTEXT_BLOCKS * BLOCK):
        chunk = chunk_of([(position, 1), (3, 1)], SegmentKind.DECODE)
        plan = plan_step(chunk, rules_of(*windows))
        shapes.add(plan.shape)
        lengths.append(len(plan.numbers))
    (shape,) = shapes
    assert all(len(spans) == 1 for spans in shape.attention)
    assert lengths == sorted(lengths)
    assert lengths[-1] == shape.num_numbers
    # Of full attention no more is copied than the longest context has; a window's table is short anyway.
    assert (lengths[0] < shape.num_numbers) == (0 in windows)


def test_a_window_needs_the_blocks_that_it_can_touch():
    """One token sees one block; a window that is longer than all contexts needs no more than they."""
    widths = [rules_of(window).table_width(window) for window in (1, 2, 8, 9, 10, 17, 10_000)]
    assert widths == [1, 2, 2, 2, 3, 3, CONTEXT_BLOCKS]


SPARE = rules_of(0, 8, is_recurrent=True, spare=SparePlaces(90, 91, 5))


def test_batches_come_in_few_shapes():
    """Answers that begin and end change the rows of a step only where a power of two is passed."""
    uses = [StateUse(number) for number in range(40)]
    shapes = {
        plan_step(chunk_of([(3, 1)] * count, SegmentKind.DECODE, uses), SPARE).shape
        for count in range(1, 41)
    }
    assert {shape.num_tokens for shape in shapes} == {1, 2, 4, 8, 16, 32, 64}
    assert len(shapes) == 7


def test_rows_of_padding_have_places_of_their_own():
    """Block and state that no request has; the number of tokens tells them apart; prompts have none."""
    uses = [StateUse(number) for number in range(3)]
    chunk = chunk_of([(3, 1), (9, 1), (1, 1)], SegmentKind.DECODE, uses, window_offset=50)
    inputs = inputs_of(plan_step(chunk, SPARE))
    full, window = inputs.attention[0], inputs.attention[8]
    assert inputs.positions.tolist() == [3, 9, 1, 0]
    assert full.slots.tolist() == [3, 101 * BLOCK + 1, 200 * BLOCK + 1, 90 * BLOCK]
    assert full.spans[0].tables[:, 0].tolist() == [0, 100, 200, 90]
    assert window.slots.tolist() == [50 * BLOCK + 3, 151 * BLOCK + 1, 250 * BLOCK + 1, 91 * BLOCK]
    assert window.spans[0].tables[:, 0].tolist() == [50, 150, 250, 91]
    assert window.spans[0].first.tolist() == [0, 0, 0, 0]
    assert inputs.delta[0].slots.tolist() == [0, 1, 2, 5]
    assert inputs.num_live.tolist() == [3]
    prompt = plan_step(chunk_of([(0, 3)], SegmentKind.PROMPT, uses), SPARE)
    assert prompt.shape.num_tokens == 3
    assert inputs_of(prompt).num_live.tolist() == [3]


def test_layers_with_a_window_have_places_of_their_own():
    """Slots and tables of the window's blocks, beside those of the other layers."""
    chunk = chunk_of([(20, 1)], SegmentKind.DECODE, window_offset=50)
    inputs = inputs_of(plan_step(chunk, rules_of(0, 8)))
    (full,), (window,) = inputs.attention[0].spans, inputs.attention[8].spans
    assert inputs.attention[0].slots.tolist() == [2 * BLOCK + 4]
    assert full.tables[0, :4].tolist() == [0, 1, 2, -1]  # the last was not set
    assert inputs.attention[8].slots.tolist() == [52 * BLOCK + 4]
    assert (window.tables.tolist(), window.first.tolist()) == ([[51, 52]], [8])


def test_states_begin_and_are_saved_where_the_chunk_says():
    """A new sequence begins with nothing, one with a snapshot with that, another goes on; runs are cut."""
    uses = [
        StateUse(3),
        StateUse(1, load=7, saves=((4, 8), (10, 9))),
        StateUse(2),
    ]
    chunk = chunk_of([(0, 5), (16, 10), (40, 3)], states=uses)
    plan = plan_step(chunk, rules_of(is_recurrent=True))
    assert plan.begins == ((3, None), (1, 7))
    assert [(span.start, span.length) for span in plan.shape.delta] == [
        (0, 5),
        (5, 4),
        (9, 6),
        (15, 3),
    ]
    assert plan.saves == ((), ((1, 8),), ((1, 9),), ())
    assert [state.slots.tolist() for state in inputs_of(plan).delta] == [[3], [1], [1], [2]]


@pytest.mark.parametrize("count", [1, 3])
def test_answers_states_move_on_together(count):
    """One span for all of them, with what is saved after it."""
    uses = [StateUse(number, saves=((1, 9),) if number == 2 else ()) for number in range(count)]
    chunk = chunk_of([(5 + n, 1) for n in range(count)], SegmentKind.DECODE, states=uses)
    plan = plan_step(chunk, rules_of(0, is_recurrent=True))
    assert [(span.start, span.sequences) for span in plan.shape.delta] == [(0, count)]
    assert plan.saves == ((((2, 9),) if count == 3 else ()),)
    assert plan.begins == ()
    assert inputs_of(plan).delta[0].slots.tolist() == [*range(count)]


def drafted(chunk: Chunk, *counts: int) -> Chunk:
    """Return a chunk whose segments end with so many drafted tokens."""
    segments = tuple(
        segment._replace(num_drafted=count)
        for segment, count in zip(chunk.segments, counts, strict=True)
    )
    return replace(chunk, segments=segments)


def chain_state(slot: int, *saved: int) -> StateUse:
    return StateUse(slot, saves=tuple(enumerate(saved, 1)))


@pytest.mark.parametrize("window", [0, 5])
def test_drafted_rows_are_sequences_of_their_own(window):
    """Each sees its own positions and those before it by the request's table; the shape is that of as many answers."""
    chunk = drafted(chunk_of([(14, 4), (3, 1)], SegmentKind.DECODE), 3, 0)
    plan = plan_step(chunk, rules_of(window))
    others = plan_step(chunk_of([(n, 1) for n in range(5)], SegmentKind.DECODE), rules_of(window))
    assert plan.shape == others.shape
    assert plan.recurs
    (span,) = inputs_of(plan).attention[window].spans
    assert (span.shape.sequences, span.shape.length) == (5, 1)
    assert span.positions[:, 0].tolist() == [14, 15, 16, 17, 3]
    for row, (table, first) in enumerate(
        zip(span.tables.numpy(), span.first.tolist(), strict=True)
    ):
        position = chunk.positions[row]
        seen = np.arange(max(0, position - window + 1) if window else 0, position + 1)
        expected = chunk.segments[row // 4].block_table[seen // BLOCK]
        np.testing.assert_array_equal(table[(seen - first) // BLOCK], expected)


def test_states_go_on_from_row_to_row():
    """Rounds by depth: a chain's rows one after another, and another answer's only row beside the first; padding is apart."""
    uses = [chain_state(0, 20, 21), StateUse(1, saves=((1, 30),)), chain_state(2, 22)]
    chunk = drafted(chunk_of([(9, 3), (4, 1), (2, 2)], SegmentKind.DECODE, uses), 2, 0, 1)
    plan = plan_step(chunk, SPARE)
    assert plan.shape.num_tokens == 8
    rounds = inputs_of(plan).delta
    assert [(span.shape.sequences, span.shape.is_apart) for span in rounds] == [(4, True)] * 4
    moves = [
        [
            (row, before, after)
            for row, before, after in zip(
                *(part.tolist() for part in (span.rows, span.slots, span.after)), strict=True
            )
            if row < 6
        ]
        for span in rounds
    ]
    assert moves == [
        [(0, 0, 20), (3, 1, 1), (4, 2, 22)],
        [(1, 20, 21), (5, 22, 2)],
        [(2, 21, 0)],
        [],
    ]
    padding = [
        (before, after)
        for span in rounds
        for row, before, after in zip(
            *(part.tolist() for part in (span.rows, span.slots, span.after)), strict=True
        )
        if row == 8
    ]
    assert padding == [(5, 5)] * 10
    # The prefix's snapshot of the answer without a draft is a copy of what its own slot then has.
    assert [save for each in plan.saves for save in each] == [(1, 30)]


def tree_of(block_tables, positions, rows, levels, states, copies) -> Chunk:
    """Return a request's tree whose branches have these tables and rows."""
    at = np.array(positions, np.int32)
    whole = Segment(
        *(RequestId(0), 0, len(at), SegmentKind.DECODE, block_tables[0], 0, states[0]),
        num_drafted=len(at) - 1,
    )
    segments, slots, start = [], [], 0
    for table, length, level, state in zip(block_tables, rows, levels, states, strict=True):
        own = at[start : start + length]
        segments.append(
            whole._replace(start=start, length=length, block_table=table, level=level, state=state)
        )
        slots.append(table[own // BLOCK] * BLOCK + own % BLOCK)
        start += length
    places = CachePlaces(np.concatenate(slots), tuple(segments), np.array(copies, np.int32))
    return Chunk(
        *(ChunkId(1), (whole,), np.zeros(len(at), np.int32), at, places.slots),
        np.zeros(0, np.int32),
        branch_places=places,
    )


def test_branches_go_on_from_their_parents():
    """By their own tables, with copies of what they share, and from the state after their parent."""
    tables = [np.array([7, 8], np.int32), np.array([7, 9], np.int32)]
    # Rows 0, 1, 2 are the first branch; row 3 is a second child of row 0, row 4 its child.
    states = [chain_state(0, 20, 21), StateUse(23, load=20, saves=((1, 22),))]
    copies = [[8 * BLOCK, 9 * BLOCK], [8 * BLOCK + 1, 9 * BLOCK + 1], [5, 6]]
    chunk = tree_of(tables, [9, 10, 11, 10, 11], (3, 2), (0, 1), states, copies)
    plan = plan_step(chunk, SPARE)
    inputs = inputs_of(plan)
    (span,) = inputs.attention[0].spans
    assert span.tables[:5, :2].tolist() == [[7, 8]] * 3 + [[7, 9]] * 2
    assert inputs.attention[0].slots[:5].tolist() == [65, 66, 67, 74, 75]
    copied = inputs.attention[0].copies
    spare_slot = 90 * BLOCK
    assert copied.t().tolist() == [*copies, [spare_slot, spare_slot]]
    moves = {
        row: (before, after)
        for span in inputs.delta
        for row, before, after in zip(
            *(part.tolist() for part in (span.rows, span.slots, span.after)), strict=True
        )
        if row < 5
    }
    assert moves == {0: (0, 20), 1: (20, 21), 3: (20, 22), 2: (21, 0), 4: (22, 23)}


def test_drafted_rows_beside_tokens_that_are_computed_again():
    """No shape recurs then: drafted rows are sequences all the same, and the others' states move on run by run."""
    uses = [StateUse(3, saves=((2, 9),)), chain_state(0, 20)]
    chunk = drafted(chunk_of([(0, 5), (9, 2)], SegmentKind.DECODE, uses), 0, 1)
    plan = plan_step(chunk, SPARE)
    assert not plan.recurs
    assert [span.length for span in plan.shape.attention[0]] == [5, 1]
    assert [(span.start, span.length, span.is_apart) for span in plan.shape.delta] == [
        *((0, 2, False), (2, 3, False)),
        *((5, 1, True), (6, 1, True)),
    ]
    assert plan.saves == (((3, 9),), (), (), ())
    apart = inputs_of(plan).delta[2:]
    assert [(each.slots.tolist(), each.after.tolist(), each.rows.tolist()) for each in apart] == [
        ([0], [20], [5]),
        ([20], [0], [6]),
    ]
