"""Experts over raw blocks in device slots: one body of tests over the twin, the interpreter and a device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.compare import assert_within
from tests.support.device_cases import rounded_outputs
from tests.support.kernel_cases import (
    PLAIN,
    exact_outputs,
    expert_work,
    make_expert,
    make_weight,
    normal_weight,
    same_bits,
    with_formula,
)
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import ExpertActivation

ARITHMETICS = pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])


def any_weight(rng, format_name: str, rows: int, cols: int):
    """Any format; scaled so that a gate of normal tokens is of order one."""
    make = normal_weight if format_name in PLAIN else make_weight
    return make(rng, format_name, rows, cols)


@cache
def case(formats: tuple[str, str, str], counts: tuple[int, ...], hidden: int, intermediate: int):
    """Work on few tokens, and what the reference kernels make of it."""
    rng = np.random.default_rng(sum(counts) + hidden)
    experts = [make_expert(rng, formats, hidden, intermediate, any_weight) for _ in counts]
    work = expert_work(rng, experts, counts, tokens=5)
    return work, ReferenceKernels().expert_outputs(work)


def check(kernels, prompt: bool, formats, counts, hidden: int, intermediate: int) -> None:
    """The implementation's outputs of a case are within its tolerance of the reference."""
    work, expected = case(formats, counts, hidden, intermediate)
    places = np.arange(len(counts))[::-1] * 2 + 1  # slots in no order, with others between
    out = kernels.expert_outputs(kernels.slot_work(work, places), prompt=prompt)
    if prompt and kernels.name == "cuda":
        # Few inner numbers may nearly cancel, and then what is rounded matters: rounded here, too.
        assert_within(out, rounded_outputs(work), "device/rounded operands")
    else:
        assert_within(out, expected, kernels.tolerance(prompt=prompt))


@pytest.mark.slow
@ARITHMETICS
@pytest.mark.parametrize(
    "formats",
    [
        ("Q4_K", "Q4_K", "Q6_K"),
        ("Q5_K", "IQ4_XS", "MXFP4"),
        ("Q8_0", "Q4_0", "BF16"),
        ("F16", "BF16", "Q4_K"),
        ("Q2_K", "Q2_K", "Q3_K"),
        ("IQ2_XXS", "IQ2_XXS", "IQ3_S"),
    ],
    ids="-".join,
)
def test_experts_of_every_format(kernels, prompt, formats):
    """One pair, none and several on an expert; gate and up of one format or of two."""
    check(kernels, prompt, formats, (1, 0, 3), 256, 256)


@pytest.mark.slow
@ARITHMETICS
@pytest.mark.parametrize(
    ("formats", "hidden", "intermediate"),
    [
        (("Q8_0", "MXFP4", "Q4_0"), 288, 96),
        (("F16", "F16", "BF16"), 33, 7),
        (("BF16", "Q8_0", "F16"), 320, 1),
        (("Q4_1", "Q5_0", "IQ4_NL"), 288, 96),
        (("NVFP4", "Q5_1", "NVFP4"), 320, 64),
        (("Q3_K", "Q2_K", "F32"), 256, 7),
        (("IQ3_XXS", "IQ3_S", "F32"), 512, 5),
        (("IQ2_XXS", "IQ2_XS", "F32"), 256, 3),
        (("IQ2_S", "IQ1_S", "F16"), 256, 1),
        (("IQ1_M", "TQ1_0", "F32"), 256, 9),
        (("TQ2_0", "F32", "F32"), 256, 1),
    ],
    ids=str,
)
def test_experts_of_odd_sizes(kernels, prompt, formats, hidden, intermediate):
    """Columns that no chunk divides and rows that no program divides; one inner row."""
    check(kernels, prompt, formats, (2, 1), hidden, intermediate)


@ARITHMETICS
@pytest.mark.parametrize("has_biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("activation", list(ExpertActivation), ids=lambda each: each.name)
def test_experts_of_every_formula(kernels, prompt, activation, has_biases):
    """With and without biases of each expert, in rows of whole blocks of 32: what the reference makes of them."""
    given, _ = case(("MXFP4", "MXFP4", "Q8_0"), (2, 0, 1), 96, 32)
    work = with_formula(np.random.default_rng(4), given, activation, has_biases=has_biases)
    places = np.array([3, 1, 0])
    out = kernels.expert_outputs(kernels.slot_work(work, places), prompt=prompt)
    expected = ReferenceKernels().expert_outputs(work)
    assert_within(out, expected, kernels.tolerance(prompt=prompt))


@ARITHMETICS
def test_experts_without_a_slot_are_not_computed(kernels, prompt):
    """The pairs before, between and behind theirs have the same bits; theirs stay as the memory was."""
    work, _ = case(("F16",) * 3, (2, 1, 3, 1), 33, 7)
    given = kernels.slot_work(work, np.arange(4))
    everything = kernels.expert_outputs(given, prompt=prompt)
    some = replace(given, slots=kernels.tensor(np.array([0, -1, 2, -1], np.int32)))
    found = kernels.expert_outputs(some, prompt=prompt)
    is_here = np.repeat([True, False, True, False], work.counts)
    assert same_bits(found[is_here], everything[is_here])
    assert kernels.name == "twin" or np.isnan(found[~is_here]).all()


@pytest.mark.slow
@ARITHMETICS
@pytest.mark.parametrize("which", [("gate",), ("gate", "up", "down")], ids="-".join)
def test_experts_with_scales_of_their_own(kernels, prompt, which):
    """Each expert's own, before and behind the activation: what the reference makes of the same stack."""
    work, _ = case(("Q8_0",) * 3, (2, 1, 3), 96, 64)
    rng = np.random.default_rng(9)
    scales = {name: rng.uniform(0.3, 3.0, 3).astype(np.float32) for name in which}
    stack = replace(
        work.stack,
        **{name: replace(getattr(work.stack, name), scales=each) for name, each in scales.items()},
    )
    expected = ReferenceKernels().expert_outputs(replace(work, stack=stack))
    factors = stack.pair_factors()
    assert factors is not None
    gates, outputs = (each[np.repeat(work.experts, work.counts)] for each in factors)
    given = kernels.slot_work(replace(work, scale=work.scale * outputs), np.arange(3))
    out = kernels.expert_outputs(replace(given, gate_scale=kernels.tensor(gates)), prompt=prompt)
    assert_within(out, expected, kernels.tolerance(prompt=prompt))


@pytest.mark.slow
@ARITHMETICS
def test_all_pairs_on_one_expert(kernels, prompt):
    """More pairs than a tile holds, on the last of several experts."""
    check(kernels, prompt, ("Q8_0",) * 3, (0, 0, 67 if prompt else 5), 64, 32)


@ARITHMETICS
def test_one_token_on_one_expert(kernels, prompt):
    """The least that there can be."""
    check(kernels, prompt, ("Q8_0",) * 3, (1,), 32, 32)


@ARITHMETICS
def test_no_pairs_are_no_outputs(kernels, prompt):
    """Experts that nobody chose are not read."""
    work, _ = case(("Q8_0",) * 3, (1, 1), 32, 32)
    nobody = replace(work, counts=work.counts * 0, rows=work.rows[:0], scale=work.scale[:0])
    out = kernels.expert_outputs(kernels.slot_work(nobody, np.arange(2)), prompt=prompt)
    assert out.shape == (0, 32)


@pytest.mark.slow
@ARITHMETICS
def test_a_tokens_outputs_do_not_depend_on_the_others(kernels, prompt):
    """A pair alone and among others that need larger tiles: the same bits on a device."""
    work, _ = case(("Q8_0",) * 3, (19 if prompt else 3,), 96, 64)
    last = len(work.rows) - 1
    alone = replace(
        work, counts=work.counts * 0 + 1, rows=work.rows[last:], scale=work.scale[last:]
    )
    one, all_ = (
        kernels.expert_outputs(kernels.slot_work(each, np.arange(1)), prompt=prompt)
        for each in (alone, work)
    )
    if kernels.name == "cuda":
        assert same_bits(one, all_[last:])
    # NumPy adds up matrix products of different shapes in different orders.
    assert_within(one, all_[last:], "device/float32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ARITHMETICS
def test_experts_of_real_size(prompt):
    """Hidden 2048, intermediate 768, many tokens: within the tolerance of the exact result."""
    from tests.support.device_cases import DeviceKernels

    rng = np.random.default_rng(3)
    formats = ("Q4_K", "Q4_K", "Q6_K")
    experts = [make_expert(rng, formats, 2048, 768) for _ in range(2)]
    work = expert_work(rng, experts, [100, 1], tokens=64)
    device = DeviceKernels("cuda")
    out = device.expert_outputs(device.slot_work(work, np.arange(2)), prompt=prompt)
    assert_within(out, exact_outputs(work), device.tolerance(prompt=prompt))
