"""Short convolutions and Mamba2: one body of tests over all implementations, and no cut of a sequence shows in a bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.compare import nmse
from tests.support.kernel_cases import DENSE_ISAS
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.recurrent_contract import (
    MambaRule,
    MambaShape,
    RecurrentStates,
    ShortConvRule,
    ShortConvShape,
)

SHAPES = {
    "real_heads": MambaShape(4, 64, 2, 128, 4),
    "one_group": MambaShape(6, 16, 1, 16, 4),
    "odd": MambaShape(3, 37, 3, 7, 2),
    "one_of_each": MambaShape(1, 1, 1, 1, 3),
    "wide": MambaShape(2, 130, 1, 5, 4),
    "short_conv": ShortConvShape(96, 3),
    "odd_conv": ShortConvShape(37, 2),
    "long_conv": ShortConvShape(16, 6),
    "one_channel": ShortConvShape(1, 4),
}


def drawn(shape, tokens, seed=3):
    """Return a rule and rows with the usual spreads."""
    draw = np.random.default_rng(seed)

    def normal(*dims, spread=1.0, mean=0.0):
        return (mean + spread * draw.standard_normal(dims)).astype(np.float32)

    rows = normal(tokens, shape.row)
    if isinstance(shape, ShortConvShape):
        return ShortConvRule(shape, normal(shape.conv_width, shape.channels, spread=0.5)), rows
    rule = MambaRule(
        shape,
        conv=normal(shape.conv_width, shape.channels, spread=0.5),
        conv_bias=normal(shape.channels, spread=0.3),
        step_bias=normal(shape.heads, spread=0.5),
        decay=-np.exp(normal(shape.heads)),
        skip=normal(shape.heads, spread=0.3, mean=1.0),
        gain=normal(shape.width, spread=0.1, mean=1.0),
        epsilon=1e-6,
    )
    return rule, rows


def states_of(shape, slots, seed=5):
    """Return states of sequences that have come some way."""
    draw = np.random.default_rng(seed)
    conv = draw.standard_normal((slots, *shape.state.conv))
    recurrent = draw.standard_normal((slots, *shape.state.heads))
    return RecurrentStates(conv.astype(np.float32), 0.1 * recurrent.astype(np.float32))


def run(dense, rule, rows, states, runs):
    """Return the output, NaN where no run is."""
    out = np.full((len(rows), rule.shape.width), np.nan, np.float32)
    dense.recur(rows, rule, np.array(runs, np.int32).reshape(-1, 3), states, out)
    return out


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_set_gives_what_the_reference_gives(isa, shape):
    """Outputs and states of two sequences agree, within float32's rounding; other slots are not touched."""
    rule, rows = drawn(shape, 21)
    runs = [(0, 8, 2), (8, 13, 0)]
    expected_states, found_states = states_of(shape, 3), states_of(shape, 3)
    expected = run(ReferenceDense(), rule, rows, expected_states, runs)
    found = run(NativeKernels(isa, threads=2).dense, rule, rows, found_states, runs)
    assert nmse(found, expected) < 1e-10
    assert np.array_equal(found_states.conv, expected_states.conv)
    if found_states.recurrent.size:
        assert nmse(found_states.recurrent, expected_states.recurrent) < 1e-10
    before = states_of(shape, 3)
    assert np.array_equal(found_states.recurrent[1], before.recurrent[1])
    assert np.array_equal(found_states.conv[1], before.conv[1])


@pytest.mark.parametrize(
    "dense", [NativeKernels(threads=2).dense, ReferenceDense()], ids=["native", "reference"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cuts", [[1] * 13, [1, 12], [5, 8], [3, 3, 3, 3, 1]], ids=str)
def test_no_cut_changes_a_bit(dense, shape, cuts):
    """A sequence in pieces, token by token among them, has the output and state of the whole."""
    rule, rows = drawn(shape, sum(cuts))
    whole_states, cut_states = states_of(shape, 1), states_of(shape, 1)
    whole = run(dense, rule, rows, whole_states, [(0, sum(cuts), 0)])
    start = 0
    for length in cuts:
        part = run(dense, rule, rows, cut_states, [(start, length, 0)])
        mine = slice(start, start + length)
        assert np.array_equal(part[mine], whole[mine])
        assert np.isnan(np.delete(part, np.arange(start, start + length), axis=0)).all()
        start += length
    assert np.array_equal(cut_states.recurrent, whole_states.recurrent)
    assert np.array_equal(cut_states.conv, whole_states.conv)


@pytest.mark.parametrize("name", ["real_heads", "short_conv"])
def test_threads_change_no_bit(name):
    """One thread gives what four give."""
    shape = SHAPES[name]
    rule, rows = drawn(shape, 17)
    states = [states_of(shape, 2) for _ in range(2)]
    outs = [
        run(NativeKernels(threads=threads).dense, rule, rows, left, [(0, 9, 0), (9, 8, 1)])
        for threads, left in zip((1, 4), states, strict=True)
    ]
    assert np.array_equal(*outs)
    assert np.array_equal(states[0].recurrent, states[1].recurrent)


@pytest.mark.parametrize("name", ["one_group", "short_conv"])
@pytest.mark.parametrize(
    ("runs", "what"),
    [
        ([(0, 9, 0)], "follow each other"),
        ([(0, 2, 0), (2, 2, 0)], "one slot"),
        ([(0, 2, 2)], "beyond the states"),
    ],
)
def test_runs_out_of_range_are_refused(name, runs, what):
    """Rows and slots are checked before anything is written."""
    shape = SHAPES[name]
    rule, rows = drawn(shape, 4)
    with pytest.raises(ValueError, match=what):
        run(NativeKernels(threads=1).dense, rule, rows, states_of(shape, 2), runs)


@pytest.mark.parametrize("name", ["one_group", "short_conv"])
def test_nothing_to_do_is_no_fault(name):
    """A chunk without tokens leaves states alone."""
    shape = SHAPES[name]
    rule, rows = drawn(shape, 0)
    states = states_of(shape, 1)
    assert run(NativeKernels(threads=1).dense, rule, rows, states, []).shape == (0, shape.width)
    assert np.array_equal(states.conv, states_of(shape, 1).conv)
