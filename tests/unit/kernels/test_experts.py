"""Whole experts: one body of tests over the reference and every instruction set of the machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.compare import assert_within, nmse
from tests.support.kernel_cases import (
    IMPLEMENTATIONS,
    ISAS,
    PLAIN,
    REFERENCE,
    exact_outputs,
    expert_work,
    make_expert,
    make_weight,
    native,
    normal_weight,
    routed_work,
    same_bits,
    stacked,
    tokens_of,
)
from thermocline.kernels.contract import ExpertWork

if TYPE_CHECKING:
    from thermocline.kernels.weight import ExpertWeights, Weight

pytestmark = pytest.mark.usefixtures("guarded")
MIXED = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "F16", "BF16"),
    ("Q5_K", "Q4_0", "Q8_0"),
    ("F32",) * 3,
    ("Q6_K", "Q5_K", "Q4_K"),
    ("Q8_0", "Q8_0", "Q5_K"),
]


@cache
def experts_of(formats: tuple[str, str, str], count: int) -> tuple[ExpertWeights, ...]:
    """Experts of hidden size 256 and intermediate size 512; quantising takes longer than the tests."""
    rng = np.random.default_rng(count)
    return tuple(make_expert(rng, formats, 256, 512) for _ in range(count))


@cache
def real_expert() -> ExpertWeights:
    """One of Qwen3-30B-A3B's size and types."""
    return make_expert(np.random.default_rng(0), MIXED[0], 2048, 768)


@pytest.mark.parametrize("formats", MIXED, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_expert_outputs_are_the_formula(implementation, formats):
    """scale * down(silu(gate x) * up x): rows in any order, repeated, and an expert without pairs."""
    rng = np.random.default_rng(9)
    experts = experts_of(formats, 4)
    work = expert_work(rng, experts, [12, 0, 40, 1], tokens=24)
    exact = implementation == REFERENCE or formats == ("F32",) * 3
    entry = "product/float32" if exact else "experts/int8 activations"
    assert_within(implementation.make().expert_outputs(work), exact_outputs(work), entry)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_experts_of_real_size_are_within_a_hundredth(isa):
    """Hidden 2048, intermediate 768: the relative error of the whole expert is below 0.01."""
    # A pair alone may be off by 0.011; what is promised is the mean over many.
    work = expert_work(np.random.default_rng(10), [real_expert()], [48], tokens=48)
    out = native(isa, 2).expert_outputs(work)
    assert_within(out, exact_outputs(work), "experts/int8 activations")


@pytest.mark.parametrize(
    ("formats", "intermediate"),
    [
        (("Q4_K", "F32", "F32"), 40),
        (("F16", "Q6_K", "BF16"), 7),
        (("Q8_0", "Q8_0", "F16"), 33),
        (("Q4_K", "Q2_K", "Q8_0"), 96),
        (("MXFP4", "IQ4_XS", "Q5_0"), 288),
        (("IQ2_XXS", "IQ3_S", "NVFP4"), 320),
        (("Q3_K", "TQ1_0", "IQ1_M"), 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_experts_of_odd_sizes_and_of_types_that_differ(implementation, formats, intermediate):
    """Gate, up and down each of a type of their own; inner sizes that no strip divides."""
    rng = np.random.default_rng(11)
    experts = [make_expert(rng, formats, 256, intermediate, random_weight) for _ in range(3)]
    work = expert_work(rng, experts, [4, 1, 9], tokens=5)
    # Random blocks are no model's weights, and few inner columns average little.
    out, expected = implementation.make().expert_outputs(work), exact_outputs(work)
    assert nmse(out, expected) <= (1e-10 if implementation == REFERENCE else 1e-3)


@pytest.mark.parametrize("formats", [("Q4_K", "Q5_K", "Q6_K"), ("F32", "F16", "F32")], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_gate_and_up_of_one_form_but_different_blocks(implementation, formats):
    """Types that share an arithmetic have rows and blocks of their own sizes, over several spans."""
    rng = np.random.default_rng(16)
    work = expert_work(rng, [make_expert(rng, formats, 768, 256)], [9], tokens=5)
    out, expected = implementation.make().expert_outputs(work), exact_outputs(work)
    assert nmse(out, expected) <= (1e-10 if implementation == REFERENCE else 1e-3)


def random_weight(rng, format_name: str, rows: int, cols: int) -> Weight:
    """Any type; scaled so that a gate of normal tokens is of order one."""
    if format_name in PLAIN:
        return normal_weight(rng, format_name, rows, cols)
    return make_weight(rng, format_name, rows, cols)


def alone(kernels, work: ExpertWork) -> np.ndarray:
    """Each pair in a call of its own."""
    chosen = np.repeat(work.experts, work.counts)
    return np.concatenate(
        [
            kernels.expert_outputs(
                replace(
                    work,
                    experts=chosen[[pair]],
                    counts=np.ones(1, np.int32),
                    x=work.x[work.rows[[pair]]],
                    rows=np.zeros(1, np.int32),
                    scale=work.scale[[pair]],
                )
            )
            for pair in range(len(chosen))
        ]
    )


@pytest.mark.parametrize("formats", MIXED, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_pair_does_not_feel_its_neighbours(implementation, formats):
    """Each pair alone gives the bits that it has among others of many experts."""
    rng = np.random.default_rng(12)
    kernels, work = (
        implementation.make(),
        expert_work(rng, experts_of(formats, 4), [7, 5, 2, 1], tokens=4),
    )
    assert same_bits(kernels.expert_outputs(work), alone(kernels, work))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_more_pairs_than_share_one_unpacking(isa, threads):
    """300 pairs on one expert, beside one with few: each has the bits that it has alone."""
    rng = np.random.default_rng(13)
    work = expert_work(rng, experts_of(MIXED[0], 2), [300, 2], tokens=50)
    kernels = native(isa, threads)
    assert same_bits(kernels.expert_outputs(work), alone(kernels, work))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_gates_far_out_are_finite(implementation):
    """A sigmoid far out on either side is 0 or 1, not NaN."""
    rng = np.random.default_rng(14)
    expert = make_expert(rng, ("F32",) * 3, 32, 32)
    row = expert.gate.raw.view(np.float32)[0]
    work = ExpertWork(
        stacked([expert]),
        np.zeros(1, np.int32),
        np.array([2], np.int32),
        np.stack([row * 1000, row * -1000]).astype(np.float32),
        np.array([0, 1], np.int32),
        np.ones(2, np.float32),
    )
    with np.errstate(over="ignore"):
        assert np.isfinite(implementation.make().expert_outputs(work)).all()


@pytest.mark.parametrize("formats", MIXED[:3], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_the_sum_adds_the_outputs_in_slot_order(implementation, formats):
    """expert_sum is residual + ((slot 0 + slot 1) + ...) of expert_outputs, to the bit."""
    rng = np.random.default_rng(15)
    experts = experts_of(formats, 4)
    kernels = implementation.make()
    for tokens in (1, 2, 3, 9) if implementation == REFERENCE else (1, 2, 3, 9, 64, 257, 300):
        for slots in (1, 3):
            work, pair_of = routed_work(rng, experts, tokens, slots)
            residual = tokens_of(rng, tokens, 256)
            outputs = kernels.expert_outputs(work)
            total = outputs[pair_of[:, 0]]
            for slot in range(1, slots):
                total = total + outputs[pair_of[:, slot]]
            assert same_bits(kernels.expert_sum(work, pair_of, residual), total + residual), (
                f"{tokens} tokens, {slots} slots"
            )


@pytest.mark.parametrize("isa", ISAS)
def test_the_sum_of_many_pairs_on_one_expert(isa):
    """All tokens on one expert, more than share one unpacking, and hidden sizes that end in a strip."""
    rng = np.random.default_rng(16)
    experts = [make_expert(rng, ("F16", "F16", "Q8_0"), 48, 64) for _ in range(2)]
    work = expert_work(rng, experts, [0, 290], tokens=290)
    work = replace(work, rows=np.arange(290, dtype=np.int32))
    pair_of, residual = np.arange(290, dtype=np.int32)[:, None], tokens_of(rng, 290, 48)
    expected = native(isa).expert_outputs(work) + residual
    for threads in (1, 2, 3):
        assert same_bits(native(isa, threads).expert_sum(work, pair_of, residual), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_the_sum_of_an_odd_number_of_panels(isa):
    """A thread alone takes panels of an expert in twos, of which 17 are no multiple; more threads take them singly."""
    rng = np.random.default_rng(19)
    experts = [make_expert(rng, ("F16", "F16", "Q8_0"), 16 * 32 + 16, 64) for _ in range(3)]
    work, pair_of = routed_work(rng, experts, 21, 2)
    residual = tokens_of(rng, 21, 16 * 32 + 16)
    outputs = native(isa).expert_outputs(work)
    expected = outputs[pair_of[:, 0]] + outputs[pair_of[:, 1]] + residual
    for threads in (1, 2, 3):
        assert same_bits(native(isa, threads).expert_sum(work, pair_of, residual), expected)


def test_instruction_sets_agree_on_experts():
    """The same of a whole expert: the inner activations that differ in their last bits round alike."""
    rng = np.random.default_rng(18)
    work = expert_work(rng, experts_of(MIXED[0], 2), [20, 30], tokens=20)
    outs = {isa: native(isa).expert_outputs(work) for isa in ISAS}
    for isa in ISAS:
        assert_within(outs[isa], outs["portable"], "instruction sets/experts")
