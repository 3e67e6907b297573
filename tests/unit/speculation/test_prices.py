"""A step's price by its rows: measured, interpolated, or continued."""

from __future__ import annotations

import pytest

from thermocline.speculation.prices import StepPrices


def test_before_any_step_nothing_has_a_price():
    """None, also after steps on a clock that stands still."""
    prices = StepPrices()
    assert prices.seconds(1) is None
    prices.observe(1, 0.0)
    assert prices.seconds(1) is None


def test_between_measured_rows_prices_lie_between():
    """A straight line between neighbours, and on behind the last."""
    prices = StepPrices()
    prices.observe(1, 0.010)
    prices.observe(3, 0.016)
    assert prices.seconds(2) == pytest.approx(0.013)
    assert prices.seconds(3) == pytest.approx(0.016)
    assert prices.seconds(5) == pytest.approx(0.022)


def test_one_price_alone_is_continued_by_a_guess():
    """More rows cost more, fewer cost less, none costs nothing."""
    prices = StepPrices()
    prices.observe(2, 0.010)
    few, more = prices.seconds(1), prices.seconds(6)
    assert few is not None
    assert more is not None
    assert 0 < few < 0.010 < more


def test_one_slow_step_is_no_price():
    """A step that waited for the disk moves the price by little; many do move it."""
    prices = StepPrices()
    for _ in range(9):
        prices.observe(1, 0.010)
    prices.observe(1, 9.0)
    known = prices.seconds(1)
    assert known is not None
    assert known < 0.015
    for _ in range(50):
        prices.observe(1, 0.020)
    assert prices.seconds(1) == pytest.approx(0.020, rel=0.01)


def test_a_price_that_was_disturbed_once_does_not_last():
    """Too high a price is not chosen, so no step corrects it: it is forgotten, and a step of more rows bounds it."""
    prices = StepPrices()
    for _ in range(3):
        prices.observe(1, 0.010)
    prices.observe(3, 0.090)
    for _ in range(40):
        prices.observe(1, 0.010)
    found = prices.seconds(3)
    assert found is not None
    assert found < 0.020
    for _ in range(3):
        prices.observe(2, 0.030)
        prices.observe(4, 0.016)
    assert prices.seconds(2) == pytest.approx(0.016)


def test_how_far_a_price_is_continued():
    """Twice as many more rows as were measured, and one at least."""
    prices = StepPrices()
    assert prices.most_more_rows(1) == 1
    prices.observe(1, 0.010)
    assert prices.most_more_rows(1) == 1
    prices.observe(4, 0.020)
    assert [prices.most_more_rows(rows) for rows in (1, 3, 8)] == [6, 2, 1]


def test_rows_that_get_cheaper_go_on_so():
    """Behind the last that was measured a row costs what those of the upper half did, where that is less."""
    prices = StepPrices()
    for rows, seconds in ((1, 1.0), (2, 1.6), (4, 2.2)):
        prices.observe(rows, seconds)
    assert prices.seconds(6) == pytest.approx(2.2 + 2 * 0.3)
    dearer = StepPrices()
    for rows, seconds in ((1, 1.0), (2, 1.1), (4, 2.2)):
        dearer.observe(rows, seconds)
    assert dearer.seconds(6) == pytest.approx(2.2 + 2 * 0.4)
