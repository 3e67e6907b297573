"""Figures of chosen experts: what grew between two readings, and how much ran at once."""

from __future__ import annotations

import pytest

from thermocline.experts.figures import ExpertFigures


def test_the_difference_is_what_grew():
    """Field by field."""
    before = ExpertFigures(hits=1, misses=2, cpu=3, bytes_disk=10)
    after = ExpertFigures(hits=5, misses=2, cpu=4, bytes_disk=30, at_ns=7)
    assert after - before == ExpertFigures(hits=4, cpu=1, bytes_disk=20, at_ns=7)


@pytest.mark.parametrize(
    ("cpu_ns", "device_ns", "at_ns", "ratio"),
    [(60, 70, 100, 0.3), (60, 30, 100, 0.0), (100, 100, 100, 1.0), (9, 9, 0, 0.0)],
)
def test_what_can_not_have_been_apart_ran_at_once(cpu_ns, device_ns, at_ns, ratio):
    """Both were busy at once for at least what they have beyond the time itself."""
    figures = ExpertFigures(cpu_ns=cpu_ns, device_ns=device_ns, at_ns=at_ns)
    assert figures.overlap_ratio == pytest.approx(ratio)
