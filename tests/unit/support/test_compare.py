"""The measure and the table that every numeric comparison goes through."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.compare import TOLERANCES, assert_within, nmse


def test_it_is_the_share_of_the_oracles_power():
    """An error of a tenth of the oracle's size is a hundredth of its power, whatever the scale."""
    oracle = np.array([3.0, -4.0])
    for scale in (1e-20, 1.0, 1e20):
        assert nmse(oracle * scale * 1.1, oracle * scale) == pytest.approx(0.01)
    assert nmse(oracle, oracle) == 0.0


def test_small_errors_in_float32_are_not_lost():
    """The difference is taken in double: one unit in the last place of one of a million counts."""
    oracle = np.ones(1_000_000, np.float32)
    ours = oracle.copy()
    ours[5] = np.nextafter(np.float32(1), np.float32(2))
    assert nmse(ours, oracle) == pytest.approx(2.0**-46 / 1e6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad):
    """No tolerance admits a NaN or an infinity, on either side or on both."""
    good, broken = np.array([1.0, 2.0]), np.array([1.0, bad])
    for ours, oracle in ((broken, good), (good, broken), (broken, broken)):
        assert nmse(ours, oracle) == np.inf


def test_a_silent_oracle_allows_only_silence():
    """Against zeros only zeros are right."""
    assert nmse(np.zeros(3), np.zeros(3)) == 0.0
    assert nmse(np.array([0.0, 1e-30, 0.0]), np.zeros(3)) == np.inf


def test_shapes_must_agree():
    """Nothing is broadcast."""
    with pytest.raises(AssertionError, match="shapes differ"):
        nmse(np.zeros((2, 3)), np.zeros(3))


def test_an_error_beyond_the_table_fails():
    """The check holds at the tolerance and fails beyond it, naming what was found and allowed."""
    allowed = TOLERANCES["transformers/F32"]
    oracle = np.array([1.0])
    assert_within(oracle * (1 + 0.9 * np.sqrt(allowed)), oracle, "transformers/F32")
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within(oracle * (1 + 1.1 * np.sqrt(allowed)), oracle, "transformers/F32")
