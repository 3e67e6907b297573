"""What the server's load test says of memory."""

from __future__ import annotations

import pytest

from benchmarks.server_load import Load


def growth(mib_at):
    """The growth of memory that is `mib_at(seconds)`, looked at every six seconds for three minutes."""
    load = Load(4, 180.0)
    load.memory = [(6.0 * n, mib_at(6.0 * n)) for n in range(30)]
    return load.growth_mib_per_min


def test_what_goes_on_is_growth():
    """A leak of 1.5 MiB a minute, on top of caches that fill within the first third."""
    assert growth(lambda s: 100 + min(s, 50.0) + 1.5 * s / 60) == pytest.approx(1.5)


def test_a_step_is_none():
    """One step of a MiB late in the run, as allocators make them."""
    assert growth(lambda s: 100.0 + (s > 140)) == 0


def test_many_steps_are():
    """A quarter of a MiB every ten seconds is 1.5 a minute."""
    assert growth(lambda s: 100 + 0.25 * (s // 10)) == pytest.approx(1.5, rel=0.05)


def test_without_looks_there_is_none():
    """A run that ended at once."""
    assert Load(4, 180.0).growth_mib_per_min == 0
