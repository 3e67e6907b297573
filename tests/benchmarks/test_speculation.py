"""Who is measured on, and what the best of many noisy figures is."""

from __future__ import annotations

import random

import pytest

from benchmarks.speculation import contenders, of_best

SIDES = {
    "off": ((), None),
    "auto": (("a",), None),
    "1 drafted": (("a",), 1),
    "8 drafted": (("a",), 8),
}


def test_lengths_that_are_far_behind_are_left_out():
    """What chooses by itself never is, however slow."""
    speeds = {
        "off": [10.0, 10.0],
        "auto": [2.0, 2.0],
        "1 drafted": [9.0, 9.0],
        "8 drafted": [7.0, 7.0],
    }
    assert contenders(SIDES, [*SIDES], speeds) == ["off", "auto", "1 drafted"]
    speeds["1 drafted"] = [14.0, 14.0]
    assert contenders(SIDES, [*SIDES], speeds) == ["off", "auto", "1 drafted"]
    del speeds["8 drafted"]
    assert contenders(SIDES, ["off", "auto", "1 drafted"], speeds) == ["off", "auto", "1 drafted"]


def test_the_best_of_equals_is_no_better():
    """Six sides that differ by chance alone: chosen and compared in the same rounds, the best would be some percent faster."""
    draws = random.Random(3)
    found, flattered = [], []
    for _ in range(100):
        off, ours, *others = [[draws.gauss(50.0, 4.0) for _ in range(12)] for _ in range(8)]
        rivals = {str(number): speeds for number, speeds in enumerate(others)}
        found.append(of_best(ours, rivals, off))
        flattered.append(min(sum(ours) / sum(speeds) for speeds in others))
    assert sum(found) / 100 == pytest.approx(1.0, abs=0.01)
    assert sum(flattered) / 100 < 0.98


def test_a_faster_rival_is_found():
    """In three rounds, where all tell, and in twelve."""
    for rounds in (3, 12):
        off, ours = [50.0] * rounds, [55.0] * rounds
        rivals = {"slow": [40.0] * rounds, "fast": [60.0] * rounds}
        assert of_best(ours, rivals, off) == pytest.approx(55 / 60)
