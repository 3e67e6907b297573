"""The first Mamba: one body of tests over all implementations, and no cut of a sequence shows in a bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.compare import nmse
from tests.support.kernel_cases import DENSE_ISAS
from tests.unit.kernels.test_recurrent import states_of
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.recurrent_contract import SelectiveInput, SelectiveRule, SelectiveShape

SHAPES = {
    "real_state": SelectiveShape(width=128, state_dim=16, rank=8, conv_width=4),
    "odd": SelectiveShape(width=37, state_dim=7, rank=3, conv_width=2),
    "one_of_each": SelectiveShape(width=1, state_dim=1, rank=1, conv_width=3),
    "wide": SelectiveShape(width=201, state_dim=5, rank=4, conv_width=6),
    "tall": SelectiveShape(width=10, state_dim=130, rank=4, conv_width=4),
}


def drawn(shape, tokens, seed=3):
    """Return a rule, rows, and what the products give, with the usual spreads."""
    draw = np.random.default_rng(seed)

    def normal(*dims, spread=1.0, mean=0.0):
        return (mean + spread * draw.standard_normal(dims)).astype(np.float32)

    rule = SelectiveRule(
        shape,
        conv=normal(shape.conv_width, shape.width, spread=0.5),
        conv_bias=normal(shape.width, spread=0.3),
        step_bias=normal(shape.width, spread=0.5, mean=-1.0),
        decay=-np.exp(normal(shape.state_dim, shape.width)),
        skip=normal(shape.width, spread=0.3, mean=1.0),
    )
    rows = normal(tokens, shape.row)
    products = [normal(tokens, size) for size in (shape.width, shape.state_dim, shape.state_dim)]
    return rule, rows, products


def convolve(dense, rule, rows, states, runs):
    """Return what the convolution gives, NaN where no run is."""
    out = np.full((len(rows), rule.shape.width), np.nan, np.float32)
    dense.selective_convolution(rows, rule, np.array(runs, np.int32).reshape(-1, 3), states, out)
    return out


def scan(dense, rule, given, states, runs):
    """Return what the last product takes, NaN where no run is."""
    out = np.full((len(given.rows), rule.shape.width), np.nan, np.float32)
    dense.selective_scan(given, rule, np.array(runs, np.int32).reshape(-1, 3), states, out)
    return out


@pytest.mark.parametrize("isa", DENSE_ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_set_gives_what_the_reference_gives(isa, shape):
    """Outputs and states of two sequences agree, within float32's rounding; other slots are not touched."""
    rule, rows, products = drawn(shape, 21)
    runs = [(0, 8, 2), (8, 13, 0)]
    states = [states_of(shape, 3) for _ in range(2)]
    kernels = ReferenceDense(), NativeKernels(isa, threads=2).dense
    expected, found = (
        convolve(dense, rule, rows, mine, runs) for dense, mine in zip(kernels, states, strict=True)
    )
    assert nmse(found, expected) < 1e-10
    given = SelectiveInput(rows, expected, *products)
    expected, found = (
        scan(dense, rule, given, mine, runs) for dense, mine in zip(kernels, states, strict=True)
    )
    assert nmse(found, expected) < 1e-10
    assert np.array_equal(states[1].conv, states[0].conv)
    assert nmse(states[1].recurrent, states[0].recurrent) < 1e-10
    before = states_of(shape, 3)
    assert np.array_equal(states[1].recurrent[1], before.recurrent[1])
    assert np.array_equal(states[1].conv[1], before.conv[1])


@pytest.mark.parametrize(
    "dense", [NativeKernels(threads=2).dense, ReferenceDense()], ids=["native", "reference"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cuts", [[1] * 13, [1, 12], [5, 8], [3, 3, 3, 3, 1]], ids=str)
def test_no_cut_changes_a_bit(dense, shape, cuts):
    """A sequence in pieces, token by token among them, has the output and state of the whole."""
    rule, rows, products = drawn(shape, sum(cuts))
    whole_states, cut_states = states_of(shape, 1), states_of(shape, 1)
    every = [(0, sum(cuts), 0)]
    convolved = convolve(dense, rule, rows, whole_states, every)
    given = SelectiveInput(rows, convolved, *products)
    whole = scan(dense, rule, given, whole_states, every)
    start = 0
    for length in cuts:
        mine, run = slice(start, start + length), [(start, length, 0)]
        first = convolve(dense, rule, rows, cut_states, run)
        part = scan(dense, rule, given, cut_states, run)
        assert np.array_equal(first[mine], convolved[mine])
        assert np.array_equal(part[mine], whole[mine])
        for others in (first, part):
            assert np.isnan(np.delete(others, np.arange(start, start + length), axis=0)).all()
        start += length
    assert np.array_equal(cut_states.recurrent, whole_states.recurrent)
    assert np.array_equal(cut_states.conv, whole_states.conv)


def test_threads_change_no_bit():
    """One thread gives what four give."""
    rule, rows, products = drawn(SHAPES["wide"], 17)
    runs, found = [(0, 9, 0), (9, 8, 1)], []
    for threads in (1, 4):
        dense, states = NativeKernels(threads=threads).dense, states_of(SHAPES["wide"], 2)
        convolved = convolve(dense, rule, rows, states, runs)
        out = scan(dense, rule, SelectiveInput(rows, convolved, *products), states, runs)
        found.append((convolved, out, states.conv, states.recurrent))
    for ours, theirs in zip(*found, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("runs", "what"),
    [
        ([(0, 9, 0)], "follow each other"),
        ([(0, 2, 0), (2, 2, 0)], "one slot"),
        ([(0, 2, 2)], "beyond the states"),
    ],
)
def test_runs_out_of_range_are_refused(runs, what):
    """Rows and slots are checked before anything is written."""
    rule, rows, products = drawn(SHAPES["odd"], 4)
    dense, states = NativeKernels(threads=1).dense, states_of(SHAPES["odd"], 2)
    with pytest.raises(ValueError, match=what):
        convolve(dense, rule, rows, states, runs)
    given = SelectiveInput(rows, np.zeros((4, 37), np.float32), *products)
    with pytest.raises(ValueError, match=what):
        scan(dense, rule, given, states, runs)


@pytest.mark.parametrize("part", ["steps", "keys", "queries", "convolved"])
def test_products_of_another_size_are_refused(part):
    """Each has a row per token, and its own width."""
    rule, rows, (steps, keys, queries) = drawn(SHAPES["odd"], 4)
    given = {"convolved": steps, "steps": steps, "keys": keys, "queries": queries}
    states = states_of(SHAPES["odd"], 1)
    for wrong in (given[part][:3], np.ascontiguousarray(given[part][:, 1:])):
        mine = SelectiveInput(rows, **given | {part: wrong})
        with pytest.raises(ValueError, match=part):
            scan(NativeKernels(threads=1).dense, rule, mine, states, [(0, 4, 0)])


def test_nothing_to_do_is_no_fault():
    """A chunk without tokens leaves states alone."""
    shape = SHAPES["odd"]
    rule, rows, products = drawn(shape, 0)
    dense, states = NativeKernels(threads=1).dense, states_of(shape, 1)
    convolved = convolve(dense, rule, rows, states, [])
    given = SelectiveInput(rows, convolved, *products)
    assert scan(dense, rule, given, states, []).shape == (0, shape.width)
    for ours, theirs in zip(
        *((s.conv, s.recurrent) for s in (states, states_of(shape, 1))), strict=True
    ):
        assert np.array_equal(ours, theirs)
