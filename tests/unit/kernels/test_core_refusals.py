"""What the native core refuses: a mistake is an error at the boundary, never a read out of bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.kernel_cases import (
    expert_work,
    make_expert,
    make_weight,
    native,
    normal_weight,
    stacked,
)
from thermocline.errors import ConfigError
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.native import load_native

if TYPE_CHECKING:
    from thermocline.kernels.weight import Weight

ISA = "portable"


@pytest.fixture
def weight():
    """A weight [4, 64] of blocks of 32."""
    return make_weight(np.random.default_rng(1), "Q8_0", 4, 64)


@pytest.fixture
def work():
    """Three pairs on one expert of hidden and intermediate size 64."""
    rng = np.random.default_rng(2)
    return expert_work(rng, [make_expert(rng, ("Q8_0",) * 3, 64, 64)], [3], tokens=2)


@pytest.mark.parametrize(
    ("x", "add"),
    [
        (np.zeros((1, 32), np.float32), None),
        (np.zeros((1, 65), np.float32), None),
        (np.zeros((2, 64), np.float32), np.zeros((2, 5), np.float32)),
        (np.zeros((2, 64), np.float32), np.zeros((1, 4), np.float32)),
    ],
)
def test_products_of_wrong_shapes_are_refused(weight, x, add):
    """x must have the weight's columns, and what is added the output's shape."""
    with pytest.raises(ValueError, match=r"columns|shape"):
        native(ISA).matmul(weight, x, add)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 64)),
        np.zeros((2, 64), np.float16),
        np.zeros((2, 64), np.int32),
        np.zeros((2, 128), np.float32)[:, ::2],
        np.zeros((64, 2), np.float32).T,
        np.zeros((2, 64, 1), np.float32),
    ],
    ids=["float64", "float16", "int32", "strided", "transposed", "three axes"],
)
def test_arrays_that_would_need_a_copy_are_refused(weight, work, x):
    """Other element types, strides or axes are refused, not converted."""
    with pytest.raises(TypeError):
        native(ISA).matmul(weight, x)
    with pytest.raises(TypeError):
        native(ISA).expert_outputs(replace(work, x=x))


@pytest.mark.parametrize("add", [np.zeros((2, 4)), np.zeros((2, 8), np.float32)[:, ::2]])
def test_an_addend_that_would_need_a_copy_is_refused(weight, add):
    """The addend is no exception."""
    with pytest.raises(TypeError):
        native(ISA).matmul(weight, np.zeros((2, 64), np.float32), add)


def test_weights_that_would_need_a_copy_are_refused(weight):
    """A weight is computed from where it lies, or not at all."""
    x = np.zeros((2, 64), np.float32)
    for raw in (np.repeat(weight.raw, 2, axis=1)[:, ::2], weight.raw.view(np.int8)):
        with pytest.raises(TypeError):
            native(ISA).matmul(replace(weight, raw=raw), x)


def test_rows_of_broken_blocks_are_refused(weight):
    """A row is a whole number of blocks."""
    broken = replace(weight, raw=np.ascontiguousarray(weight.raw[:, :-1]))
    with pytest.raises(ValueError, match="whole number of blocks"):
        native(ISA).matmul(broken, np.zeros((2, 64), np.float32))


@pytest.mark.parametrize("row", [4, -1, 2**31 - 1])
def test_rows_that_are_not_there_are_not_decoded(weight, row):
    """A row id is checked before any row is read."""
    with pytest.raises(ValueError, match="row id"):
        native(ISA).decode_rows(weight, np.array([0, row], np.int32))


def test_outputs_must_fit():
    """The core itself checks the outputs that its Python side allocates."""
    core = load_native().Core(ISA, 1)
    weight = make_weight(np.random.default_rng(3), "Q8_0", 4, 64)
    raw = load_native().Matrix(weight.format.type_id, weight.raw)
    x = np.zeros((2, 64), np.float32)
    for shape in [(2, 3), (1, 4), (4, 2)]:
        with pytest.raises(ValueError, match="out must be"):
            core.multiply_all([raw], x, [np.zeros(shape, np.float32)])
    with pytest.raises(ValueError, match="one output per weight"):
        core.multiply_all([raw], x, [])
    out = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="single product"):
        core.multiply_all([raw, raw], x, [out, out], out)
    with pytest.raises(ValueError, match="out must be"):
        core.decode_rows(raw, np.zeros(2, np.int32), np.zeros((1, 64), np.float32))
    read_only = np.zeros((2, 4), np.float32)
    read_only.flags.writeable = False
    for unfit in (read_only, np.zeros((2, 4)), np.zeros((2, 8), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            core.multiply_all([raw], x, [unfit])


def broken_works(work: ExpertWork) -> dict[str, ExpertWork]:
    """Works that contradict themselves in one point each."""
    rng = np.random.default_rng(4)
    hidden, inner, stack = 64, 64, work.stack

    def with_weights(**parts: Weight) -> ExpertWork:
        return replace(work, stack=stacked([replace(stack[0], **parts)]))

    def with_counts(experts: list[int], counts: list[int]) -> ExpertWork:
        return replace(work, experts=np.array(experts, np.int32), counts=np.array(counts, np.int32))

    two = stacked([stack[0], stack[0]])
    return {
        "gate of another hidden size": with_weights(gate=normal_weight(rng, "Q8_0", inner, 32)),
        "up of another inner size": with_weights(up=normal_weight(rng, "Q8_0", 32, hidden)),
        "down of another hidden size": with_weights(down=normal_weight(rng, "Q8_0", 32, inner)),
        "down of another inner size": with_weights(down=normal_weight(rng, "Q8_0", hidden, 32)),
        "two gates for one expert": replace(work, stack=replace(stack, gate=two.gate)),
        "more pairs than rows": with_counts([0], [4]),
        "fewer pairs than rows": with_counts([0], [2]),
        "a negative number of pairs": with_counts([0, 0], [-1, 4]),
        "an expert that is not there": with_counts([1], [3]),
        "an expert below zero": with_counts([-1], [3]),
        "an expert without a count": with_counts([0, 0], [3]),
        "a row beyond x": replace(work, rows=np.array([0, 1, 2], np.int32)),
        "a negative row": replace(work, rows=np.array([0, 1, -1], np.int32)),
        "a scale too few": replace(work, scale=work.scale[:2]),
        "x of another hidden size": replace(work, x=np.zeros((2, 32), np.float32)),
    }


def test_works_that_contradict_themselves_are_refused(work):
    """Sizes of matrices, numbers of pairs and row ids are checked before anything is computed."""
    pair_of, residual = np.zeros((2, 1), np.int32), np.zeros((2, 64), np.float32)
    for what, broken in broken_works(work).items():
        for call in (
            lambda broken=broken: native(ISA).expert_outputs(broken),
            lambda broken=broken: native(ISA).expert_sum(broken, pair_of, residual),
        ):
            try:
                call()
            except ValueError:
                continue
            pytest.fail(f"{what} was not refused")


@pytest.mark.parametrize(
    "pair_of",
    [
        np.array([[0], [3]], np.int32),
        np.array([[0], [-1]], np.int32),
        np.zeros((1, 1), np.int32),
        np.zeros((2, 0), np.int32),
    ],
    ids=["beyond", "negative", "too few tokens", "no slot"],
)
def test_slots_without_a_pair_are_refused(work, pair_of):
    """Every slot of every token names one of the pairs."""
    with pytest.raises(ValueError, match="pair"):
        native(ISA).expert_sum(work, pair_of, np.zeros((2, 64), np.float32))


def test_a_residual_of_another_shape_is_refused(work):
    """The residual has the shape of x."""
    for shape in [(1, 64), (2, 32), (3, 64)]:
        with pytest.raises(ValueError, match="one shape"):
            native(ISA).expert_sum(work, np.zeros((2, 1), np.int32), np.zeros(shape, np.float32))


def test_no_tokens_and_no_pairs_are_no_mistake(weight, work):
    """Empty work gives empty results."""
    assert native(ISA).matmul(weight, np.zeros((0, 64), np.float32)).shape == (0, 4)
    nothing = ExpertWork(
        work.stack,
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.zeros((0, 64), np.float32),
        np.zeros(0, np.int32),
        np.zeros(0, np.float32),
    )
    assert native(ISA).expert_outputs(nothing).shape == (0, 64)
    pair_of, residual = np.zeros((0, 2), np.int32), np.zeros((0, 64), np.float32)
    assert native(ISA).expert_sum(nothing, pair_of, residual).shape == (0, 64)


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_number_of_threads_that_makes_no_sense_is_refused(threads):
    """The message names the range."""
    with pytest.raises(ConfigError, match=rf"{threads}.*1 to 1024"):
        NativeKernels(ISA, threads)


def test_an_unknown_instruction_set_is_refused_by_name():
    """The message names those that would run."""
    with pytest.raises(ConfigError, match=r"'mmx'.*auto, portable"):
        NativeKernels("mmx")
    with pytest.raises(ValueError, match="no such instruction set"):
        load_native().Core("mmx", 1)


class _Lacking:
    """A core on a machine that has only the portable set."""

    Core = None

    def instruction_sets(self):
        return [("portable", True), ("avx2", False), ("avx512", False)]


def test_an_instruction_set_that_the_machine_lacks_is_refused(monkeypatch):
    """It is known but not usable: the message names those that are."""
    monkeypatch.setattr("thermocline.kernels.cpu.load_native", _Lacking)
    with pytest.raises(ConfigError, match=r"'avx512'.*lacks it: use auto, portable$"):
        NativeKernels("avx512")


def test_the_core_itself_refuses_what_the_machine_lacks():
    """Also without the check in Python, no instruction runs that the processor does not have."""
    for name, available in load_native().instruction_sets():
        if not available:
            with pytest.raises(ValueError, match="does not have"):
                load_native().Core(name, 1)


def test_without_a_choice_the_widest_set_and_every_processor_is_used():
    """The name says so."""
    kernels = NativeKernels()
    usable = [name for name, available in load_native().instruction_sets() if available]
    isa, threads = kernels.name.split(" x ")
    assert isa == usable[-1]
    assert int(threads) >= 1
