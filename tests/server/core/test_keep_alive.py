"""Durations as Ollama's clients write them."""

from __future__ import annotations

import math

import pytest

from thermocline.errors import RequestError
from thermocline.server.core.keep_alive import parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        (300, 300.0),
        (1.5, 1.5),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("24h0m0s", 86400.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
    ],
)
def test_numbers_are_seconds_and_what_is_below_zero_is_for_ever(value, seconds):
    """As Go's time.ParseDuration reads texts, and a bare number too."""
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", ["", "m", "5 m", "5x", "five", "1h-5m", "nan", "9" * 100, math.nan]
)
def test_what_is_no_duration_is_refused(value):
    """The error names the field, and never repeats a long text."""
    with pytest.raises(RequestError, match="keep_alive") as caught:
        parse_keep_alive(value)
    assert caught.value.param == "keep_alive"
    assert len(str(caught.value)) < 200
