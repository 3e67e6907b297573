"""Formulas of experts other than SwiGLU, and biases: over the reference, every instruction set, decoding and prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.support.compare import nmse
from tests.support.kernel_cases import (
    ISAS,
    PLAIN,
    REFERENCE,
    Implementation,
    exact_outputs,
    expert_work,
    make_expert,
    make_weight,
    normal_weight,
    routed_work,
    same_bits,
    tokens_of,
    with_formula,
)
from thermocline.kernels.native import load_native
from thermocline.kernels.weight import ExpertActivation, SiluLimits

pytestmark = pytest.mark.usefixtures("guarded")

FORMULAS = [
    (activation, has_biases)
    for activation in ExpertActivation
    for has_biases in (False, True)
    if has_biases or activation is not ExpertActivation.SILU
]
KERNELS = [REFERENCE, *(Implementation(isa, 2) for isa in (*ISAS, *load_native().emulated_sets()))]
# Rows as gpt-oss has them: whole blocks of 32, not of 256.
SIZES = [
    (("F32",) * 3, 48, 40),
    (("Q8_0", "Q5_1", "MXFP4"), 288, 160),
    (("BF16", "MXFP4", "Q8_0"), 96, 11 * 32),
]
formulas = pytest.mark.parametrize(
    ("activation", "has_biases"), FORMULAS, ids=lambda each: getattr(each, "name", str(each))
)


def weight(rng, name: str, rows: int, cols: int):
    """Return a weight of any type, with gates of order one."""
    make = normal_weight if name in PLAIN or name == "Q8_0" else make_weight
    return make(rng, name, rows, cols)


@cache
def experts(formats: tuple[str, str, str], hidden: int, intermediate: int):
    """Return three experts."""
    rng = np.random.default_rng(hidden)
    return [make_expert(rng, formats, hidden, intermediate, weight) for _ in range(3)]


@formulas
@pytest.mark.parametrize(("formats", "hidden", "intermediate"), SIZES, ids=str)
@pytest.mark.parametrize("implementation", KERNELS, ids=str)
def test_outputs_are_the_formula(
    implementation, formats, hidden, intermediate, activation, has_biases
):
    """scale * (down(inner) + bias), with far values in it: one pair, none, and more than a tile of pairs."""
    rng = np.random.default_rng(21)
    given = expert_work(rng, experts(formats, hidden, intermediate), [1, 0, 19], tokens=7)
    scale = 1 if formats[0] in PLAIN else 1 / 16  # random blocks are large
    given = replace(
        given, x=given.x * np.linspace(0.2, 12, 7, dtype=np.float32)[:, None] * np.float32(scale)
    )
    work = with_formula(rng, given, activation, has_biases=has_biases)
    expected, kernels = exact_outputs(work), implementation.make()
    is_exact = implementation == REFERENCE or formats == ("F32",) * 3
    for prompt in (False, True):
        found = kernels.expert_outputs(work, prompt=prompt)
        assert nmse(found, expected) <= (1e-10 if is_exact else 1e-3)


@formulas
@pytest.mark.parametrize("implementation", KERNELS, ids=str)
def test_a_pair_has_its_bits_alone_and_in_a_sum(implementation, activation, has_biases):
    """Outputs do not depend on what is computed beside them, and the sum adds them up in slot order."""
    rng, kernels = np.random.default_rng(22), implementation.make()
    given, pair_of = routed_work(rng, experts(("MXFP4", "MXFP4", "Q8_0"), 160, 96), 21, 2)
    work = with_formula(rng, given, activation, has_biases=has_biases)
    residual = tokens_of(rng, 21, 160)
    for prompt in (False, True):
        outputs = kernels.expert_outputs(work, prompt=prompt)
        total = outputs[pair_of[:, 0]] + outputs[pair_of[:, 1]] + residual
        assert same_bits(kernels.expert_sum(work, pair_of, residual, prompt=prompt), total)
        last = len(work.rows) - 1
        alone = replace(
            work,
            experts=np.array([2], np.int32),
            counts=np.ones(1, np.int32),
            x=work.x[work.rows[[last]]],
            rows=np.zeros(1, np.int32),
            scale=work.scale[[last]],
        )
        assert same_bits(kernels.expert_outputs(alone, prompt=prompt), outputs[[last]])


@pytest.mark.parametrize("activation", list(ExpertActivation), ids=lambda each: each.name)
@pytest.mark.parametrize("implementation", KERNELS, ids=str)
def test_far_values_are_finite_and_nan_stays(implementation, activation):
    """No formula makes NaN of large numbers, and none hides a NaN."""
    rng, kernels = np.random.default_rng(23), implementation.make()
    work = expert_work(rng, experts(("F32",) * 3, 48, 40)[:1], [3], tokens=3)
    x = work.x * np.array([[1e4], [-1e4], [1]], np.float32)
    x[2, 5] = np.nan
    given = replace(work, x=x, rows=np.arange(3, dtype=np.int32))
    given = with_formula(rng, given, activation, has_biases=True)
    with np.errstate(all="ignore"):
        found = kernels.expert_outputs(given)
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2]).all()


def test_the_core_refuses_parts_that_do_not_fit():
    """A bias too few, of another length or type, beside scales, a gate or limits too many, no such formula: ValueError."""
    native = load_native()
    rng = np.random.default_rng(24)
    work = expert_work(rng, experts(("F32",) * 3, 48, 40), [1, 1, 1], tokens=2)
    stack = with_formula(rng, work, ExpertActivation.CLAMPED_SILU, has_biases=True).stack

    def handed(part, scales=None):
        return native.MatrixStack(part.format.type_id, part.raw, scales)

    gate, up, down = (handed(part) for part in stack.matrices)
    biases = [handed(part) for part in stack.bias_parts]
    assert native.Experts(gate, up, down, 1, biases)
    scaled = handed(stack.up, np.ones(3, np.float32))
    for parts in (
        (gate, up, down, 1, biases[:2]),
        (gate, up, down, 1, biases[::-1]),
        (gate, up, down, 1, [gate, up, down]),
        (gate, scaled, down, 1, biases),
        (gate, up, down, 3, []),
        (None, up, down, 0, []),
        (gate, up, down, 6, []),
        (None, up, down, 5, []),
        (gate, up, down, 4, []),
        (gate, up, down, 0, [], (1.0, 1.0)),
        (gate, up, down, 4, [], (1.0, 0.0)),
        (gate, up, down, 4, [], (np.nan, 1.0)),
    ):
        with pytest.raises(ValueError, match=r"bias|activation|scales|gate|limits"):
            native.Experts(*parts)


@pytest.mark.parametrize("implementation", KERNELS, ids=str)
def test_limits_that_nothing_reaches_change_nothing(implementation):
    """Behind them is SwiGLU, to the bit; limits that are reached bound what down multiplies."""
    rng, kernels = np.random.default_rng(25), implementation.make()
    work = expert_work(rng, experts(("F32",) * 3, 48, 40), [1, 0, 19], tokens=7)
    for prompt in (False, True):
        free = kernels.expert_outputs(work, prompt=prompt)
        for limits, is_equal in ((SiluLimits(1e9, 1e9), True), (SiluLimits(0.1, 0.1), False)):
            formula = {"activation": ExpertActivation.LIMITED_SILU, "limits": limits}
            limited = replace(work, stack=replace(work.stack, **formula))
            found = kernels.expert_outputs(limited, prompt=prompt)
            assert same_bits(found, free) is is_equal
