"""The gated delta rule: one body of tests over all implementations, and no cut of a sequence shows in a bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import nmse
from tests.support.kernel_cases import DENSE_ISAS
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.delta_contract import DeltaInput, DeltaRule, DeltaShape
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.recurrent_contract import RecurrentStates

SHAPES = {
    "real_heads": DeltaShape(2, 4, 128, 128, 4, tiled=True),
    "grouped": DeltaShape(2, 6, 16, 16, 4, tiled=False),
    "odd": DeltaShape(3, 3, 7, 37, 2, tiled=True),
    "one_of_each": DeltaShape(1, 1, 1, 1, 3, tiled=True),
    "wide": DeltaShape(1, 2, 5, 130, 4, tiled=True),
    "rows_decay": DeltaShape(2, 2, 128, 128, 4, tiled=False, by_channel=True),
    "odd_rows_decay": DeltaShape(1, 3, 7, 37, 2, tiled=False, by_channel=True),
    "wide_rows_decay": DeltaShape(2, 4, 5, 130, 3, tiled=True, by_channel=True),
    "bounded": DeltaShape(2, 2, 128, 128, 4, tiled=False, by_channel=True, lower_bound=-5.0),
    "odd_bounded": DeltaShape(1, 3, 7, 37, 2, tiled=False, by_channel=True, lower_bound=-0.5),
    "bounded_alike": DeltaShape(2, 4, 5, 13, 3, tiled=True, lower_bound=-2.0),
}


def drawn(shape, tokens, seed=3):
    """Return a rule and inputs with the usual spreads."""
    draw = np.random.default_rng(seed)

    def normal(*dims, spread=1.0, mean=0.0):
        return (mean + spread * draw.standard_normal(dims)).astype(np.float32)

    heads = shape.value_heads
    rule = DeltaRule(
        shape,
        conv=normal(shape.conv_width, shape.channels, spread=0.5),
        step_bias=normal(shape.steps, spread=0.5),
        decay=np.exp(normal(heads)) * np.float32(1 if shape.lower_bound else -1),
        gain=normal(shape.value_dim, spread=0.1, mean=1.0),
        epsilon=1e-6,
        sigmoid_gate=shape.by_channel,
    )
    given = DeltaInput(
        normal(tokens, shape.channels),
        normal(tokens, shape.value_width),
        normal(tokens, shape.steps),
        normal(tokens, heads),
    )
    return rule, given


def states_of(shape, slots, seed=5):
    """Return states of sequences that have come some way."""
    draw = np.random.default_rng(seed)
    conv = draw.standard_normal((slots, shape.conv_width - 1, shape.channels))
    recurrent = draw.standard_normal((slots, shape.value_heads, shape.key_dim, shape.value_dim))
    return RecurrentStates(conv.astype(np.float32), 0.1 * recurrent.astype(np.float32))


def run(dense, rule, given, states, runs):
    """Return the output, NaN where no run is."""
    out = np.full(given.z.shape, np.nan, np.float32)
    dense.delta_rule(given, rule, np.array(runs, np.int32).reshape(-1, 3), states, out)
    return out


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_set_gives_what_the_reference_gives(isa, shape):
    """Outputs and states of two sequences agree, within float32's rounding; other slots are not touched."""
    rule, given = drawn(shape, 21)
    runs = [(0, 8, 2), (8, 13, 0)]
    expected_states, found_states = states_of(shape, 3), states_of(shape, 3)
    expected = run(ReferenceDense(), rule, given, expected_states, runs)
    found = run(NativeKernels(isa, threads=2).dense, rule, given, found_states, runs)
    assert nmse(found, expected) < 1e-10
    assert nmse(found_states.recurrent, expected_states.recurrent) < 1e-10
    assert np.array_equal(found_states.conv, expected_states.conv)
    assert np.array_equal(found_states.recurrent[1], states_of(shape, 3).recurrent[1])


@pytest.mark.parametrize(
    "dense", [NativeKernels(threads=2).dense, ReferenceDense()], ids=["native", "reference"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cuts", [[1] * 13, [1, 12], [5, 8], [3, 3, 3, 3, 1]], ids=str)
def test_no_cut_changes_a_bit(dense, shape, cuts):
    """A sequence in pieces, token by token among them, has the output and state of the whole."""
    rule, given = drawn(shape, sum(cuts))
    whole_states, cut_states = states_of(shape, 1), states_of(shape, 1)
    whole = run(dense, rule, given, whole_states, [(0, sum(cuts), 0)])
    start = 0
    for length in cuts:
        part = run(dense, rule, given, cut_states, [(start, length, 0)])
        rows = slice(start, start + length)
        assert np.array_equal(part[rows], whole[rows])
        assert np.isnan(np.delete(part, np.arange(start, start + length), axis=0)).all()
        start += length
    assert np.array_equal(cut_states.recurrent, whole_states.recurrent)
    assert np.array_equal(cut_states.conv, whole_states.conv)


@pytest.mark.parametrize("isa", DENSE_ISAS)
def test_a_bound_is_what_a_state_keeps_at_least(isa):
    """After a step that would forget all, e to the bound's power is left; a step of minus infinity forgets nothing."""
    shape = DeltaShape(1, 1, 4, 4, 2, tiled=False, by_channel=True, lower_bound=-2.0)
    rule, given = drawn(shape, 1)
    given = replace(given, beta=np.full_like(given.beta, -100.0))  # nothing is written
    for alpha, kept in ((1e4, np.exp(-2.0)), (-1e4, 1.0)):
        states, before = states_of(shape, 1), states_of(shape, 1).recurrent
        step = replace(given, alpha=np.full_like(given.alpha, alpha))
        run(NativeKernels(isa, threads=1).dense, rule, step, states, [(0, 1, 0)])
        np.testing.assert_allclose(states.recurrent, kept * before, rtol=1e-6)
    wrong = replace(rule, shape=replace(shape, lower_bound=1.0))
    with pytest.raises(ValueError, match="lower bound"):
        run(NativeKernels(isa, threads=1).dense, wrong, given, states_of(shape, 1), [(0, 1, 0)])


@pytest.mark.parametrize("isa", DENSE_ISAS)
def test_rows_that_decay_alike_are_a_state_that_decays(isa):
    """A decay for each row gives what one for all rows gives, where they are equal."""
    shape = SHAPES["grouped"]
    rule, given = drawn(shape, 19)
    apart = replace(shape, by_channel=True)
    biases = np.repeat(rule.step_bias, shape.key_dim)
    other = replace(rule, shape=apart, step_bias=biases)
    wide = replace(given, alpha=np.repeat(given.alpha, shape.key_dim, axis=1))
    dense, runs = NativeKernels(isa, threads=1).dense, [(0, 19, 1)]
    one_states, apart_states = states_of(shape, 2), states_of(shape, 2)
    expected = run(dense, rule, given, one_states, runs)
    assert nmse(run(dense, other, wide, apart_states, runs), expected) < 1e-11
    assert nmse(apart_states.recurrent, one_states.recurrent) < 1e-11


def test_a_gate_is_a_sigmoid_or_a_silu():
    """With a SiLU the output is z times what it is with a sigmoid."""
    rule, given = drawn(SHAPES["odd"], 5)
    runs, outs = [(0, 5, 0)], []
    for is_sigmoid in (True, False):
        gated = replace(rule, sigmoid_gate=is_sigmoid)
        dense = NativeKernels(threads=1).dense
        outs.append(run(dense, gated, given, states_of(SHAPES["odd"], 1), runs))
    assert nmse(outs[0] * given.z, outs[1]) < 1e-11


@pytest.mark.parametrize("name", ["real_heads", "rows_decay"])
def test_threads_change_no_bit(name):
    """One thread gives what four give."""
    shape = SHAPES[name]
    rule, given = drawn(shape, 17)
    states = [states_of(shape, 2) for _ in range(2)]
    outs = [
        run(NativeKernels(threads=threads).dense, rule, given, left, [(0, 9, 0), (9, 8, 1)])
        for threads, left in zip((1, 4), states, strict=True)
    ]
    assert np.array_equal(*outs)
    assert np.array_equal(states[0].recurrent, states[1].recurrent)


@pytest.mark.parametrize(
    ("runs", "what"),
    [
        ([(0, 9, 0)], "follow each other"),
        ([(0, 2, 0), (1, 2, 1)], "follow each other"),
        ([(0, 2, 0), (2, 2, 0)], "one slot"),
        ([(0, 2, 2)], "beyond the states"),
        ([(0, -1, 0)], "follow each other"),
    ],
)
def test_runs_out_of_range_are_refused(runs, what):
    """Rows and slots are checked before anything is written."""
    shape = SHAPES["grouped"]
    rule, given = drawn(shape, 4)
    with pytest.raises(ValueError, match=what):
        run(NativeKernels(threads=1).dense, rule, given, states_of(shape, 2), runs)


@pytest.mark.parametrize(
    ("part", "what"), [("step_bias", "number of alpha"), ("decay", "value head")]
)
def test_a_rule_of_another_size_is_refused(part, what):
    """The numbers of a rule fit its shape, or it is not taken."""
    rule, given = drawn(SHAPES["odd_rows_decay"], 2)
    short = replace(rule, **{part: getattr(rule, part)[1:].copy()})
    with pytest.raises(ValueError, match=what):
        run(NativeKernels(threads=1).dense, short, given, states_of(rule.shape, 1), [(0, 2, 0)])


def test_nothing_to_do_is_no_fault():
    """A chunk without tokens leaves states alone."""
    shape = SHAPES["grouped"]
    rule, given = drawn(shape, 0)
    states = states_of(shape, 1)
    assert run(NativeKernels(threads=1).dense, rule, given, states, []).shape == (0, 96)
    assert np.array_equal(states.recurrent, states_of(shape, 1).recurrent)
