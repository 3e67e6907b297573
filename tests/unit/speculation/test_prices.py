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
