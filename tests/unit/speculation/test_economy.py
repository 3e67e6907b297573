"""On a virtual clock, what the engine's own choice costs against no drafts and against the best fixed length.

Answers of 64 tokens; steps have a noise of 3 %, and one in a hundred takes three times as long. The bounds are those of many seeds
together, a little below what was found; before they were made, the same runs fell to 0.70 of either.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.virtual_steps import Guesses, VirtualMachine, linear
from thermocline.speculation.contract import DrafterFacts
from thermocline.speculation.speculator import Speculator

TOKENS, SEEDS = 64, 8
NOISE, SPIKES = 0.03, 0.01
LENGTHS = (1, 2, 3, 4, 6, 8)
ROWS = [1, 2, 3, 4, 5, 7, 9, 17]
COSTS = [1.0, 1.45, 1.98, 2.4, 2.7, 3.2, 3.85, 6.2]
"""Of steps of so many rows, in steps of one: 8 layers of Qwen3-30B-A3B, as they were measured."""


def block(acceptance: float) -> Guesses:
    """Each token takes half a step, and each that it has to catch up with a tenth."""
    facts = DrafterFacts("mtp", computes=True)
    return Guesses(acceptance, facts, seconds=0.0048, due_seconds=0.0009)


def boaster(acceptance: float) -> Guesses:
    """Says that its guesses are far likelier than they are."""
    return Guesses(acceptance, confidence=min(0.95, acceptance + 0.4))


def tree(acceptance: float) -> Guesses:
    """Has a second guess beside each token."""
    return Guesses(acceptance, second=acceptance)


def measured(rows: int) -> float:
    """Return what steps take where the more rows there are, the less one more costs."""
    return 0.0166 * float(np.interp(rows, ROWS, COSTS))


def price_of(slope: float | None):
    return measured if slope is None else linear(slope)


def fixed_seconds(drafter: Guesses, slope: float | None, length: int) -> float:
    """Return what an answer takes with so many drafted tokens a step, and nothing that disturbs."""
    price, done, seconds = price_of(slope), 1, 0.0
    while done < TOKENS:
        count = max(min(length, TOKENS - 1 - done), 0)
        right = 0
        while right < count and drafter.is_right(done + right):
            right += 1
        seconds += price(1 + count) + drafter.seconds * count
        seconds += drafter.due_seconds * (right + 1) if count else 0.0
        done += 1 + right
    return seconds


def ratios(make, acceptance: float, slope: float | None, before: float | None = None):
    """Return the speed of the engine's choice over that without drafts, and over the best fixed length's.

    slope: None for prices as they were measured. before: the share of right guesses of the answers before; None for the same.
    """
    chosen = plain = 0.0
    fixed = dict.fromkeys((0, *LENGTHS), 0.0)
    for seed in range(SEEDS):
        drafter = make(acceptance if before is None else before)
        machine = VirtualMachine(price_of(slope), NOISE, SPIKES, seed)
        speculator = Speculator([drafter])
        for number in range(2):
            drafter.seed = 1000 * seed + number
            machine.answer(speculator, [drafter], 40, ())
            machine.answer(speculator, [drafter], 100)
        drafter.acceptance = acceptance
        drafter.confidence = make(acceptance).confidence
        drafter.seed = 777 * seed + 5
        chosen += machine.answer(speculator, [drafter], TOKENS)
        for length in fixed:
            fixed[length] += fixed_seconds(drafter, slope, length) * (1 + 2 * SPIKES)
        plain = fixed[0]
    return plain / chosen, min(fixed.values()) / chosen


@pytest.mark.parametrize("slope", [0.15, 0.73])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("make", [Guesses, block, boaster, tree], ids=lambda make: make.__name__)
def test_the_choice_is_near_the_best(make, acceptance, slope):
    """Whatever the price of a row and of a guess, and whatever a drafter says of itself."""
    of_plain, of_best = ratios(make, acceptance, slope)
    assert of_plain > 0.96
    assert of_best > 0.95


@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.9])
def test_the_choice_is_near_the_best_where_rows_get_cheaper(acceptance):
    """So a long draft may be as good as a short one, and an estimate that strays costs most."""
    of_plain, of_best = ratios(Guesses, acceptance, None)
    assert of_plain > 0.97
    assert of_best > 0.94


@pytest.mark.parametrize(("before", "now"), [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("slope", [0.15, 0.73])
def test_an_answer_unlike_those_before_it_is_found_out(before, now, slope):
    """Within its 64 tokens: the price of finding out is a twentieth at most of no drafts, a fifth of the best that there was."""
    of_plain, of_best = ratios(Guesses, now, slope, before)
    assert of_plain > 0.96
    assert of_best > 0.8
