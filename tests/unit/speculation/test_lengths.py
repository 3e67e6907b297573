"""The lengths of drafts are those with the most expected tokens per second."""

from __future__ import annotations

import itertools
import random

import pytest

from thermocline.speculation.acceptance import expected_gains
from thermocline.speculation.lengths import choose_lengths
from thermocline.speculation.prices import StepPrices


def prices_of(seconds: list[float]) -> StepPrices:
    prices = StepPrices()
    for rows, each in enumerate(seconds, 1):
        prices.observe(rows, each)
    return prices


def test_without_a_price_nothing_is_drafted():
    """The first step of an engine has one row."""
    assert choose_lengths([[0.9] * 4], 1, StepPrices()) == [0]
    assert choose_lengths([], 1, StepPrices()) == []


@pytest.mark.parametrize(
    ("chance", "row_costs", "expected"),
    [(1.0, 0.0, 4), (0.95, 0.2, 4), (0.6, 0.3, 1), (0.3, 0.5, 0), (0.0, 0.0, 0), (0.9, 1.0, 0)],
)
def test_a_draft_is_as_long_as_it_pays(chance, row_costs, expected):
    """The better the guesses and the cheaper a row, the longer; none where a row costs what a step does."""
    prices = prices_of([0.01 * (1 + row_costs * n) for n in range(5)])
    assert choose_lengths([[chance] * 4], 1, prices) == [expected]


def test_what_drafting_costs_counts():
    """The same draft pays if it is there already, and not if it must be made for half a step each token."""
    prices = prices_of([0.010, 0.013, 0.016])
    assert choose_lengths([[0.8, 0.8]], 1, prices) == [2]
    assert choose_lengths([[0.8, 0.8]], 1, prices, token_seconds=0.005) == [0]


def test_the_choice_is_the_best_of_all():
    """Of all lengths of several drafts, none has a higher expectation, but for the margin that none must beat."""
    chance = random.Random(5)
    for _ in range(50):
        count = chance.randint(1, 3)
        drafts = [[chance.random() for _ in range(chance.randint(1, 3))] for _ in range(count)]
        steps = list(itertools.accumulate(chance.uniform(0.0, 0.5) for _ in range(9)))
        prices = prices_of([0.01 * (1 + each) for each in steps])

        def rate(lengths, drafts=drafts, prices=prices, count=count):
            gains = [
                sum(expected_gains(draft[:length]))
                for draft, length in zip(drafts, lengths, strict=True)
            ]
            seconds = prices.seconds(count + sum(lengths))
            assert seconds is not None
            return (count + sum(gains)) / seconds

        found = rate(choose_lengths(drafts, count, prices))
        best = max(map(rate, itertools.product(*(range(len(draft) + 1) for draft in drafts))))
        assert found >= best / 1.02
