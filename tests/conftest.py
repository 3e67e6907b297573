"""Fixtures for all tests: fixed seeds, and a check that no thread or task outlives its test."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

_OUR_THREADS = ("lane ", "thermocline ")


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _no_thread_left():
    """A lane or engine thread that outlives its test is a leak."""
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(_OUR_THREADS) and thread.is_alive()
    ]
    assert not left, f"threads left behind: {left}"
