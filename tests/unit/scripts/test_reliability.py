"""The run of the reliability tests: which tests a point has, and what the page of results says of them."""

from __future__ import annotations

import re
from types import SimpleNamespace

from scripts.reliability import (
    OTHERS,
    PAGE,
    ROOT,
    Collector,
    Outcome,
    new_rows,
    points,
    rows_of,
    table,
)


def report(nodeid, outcome="passed", when="call", **measured):
    """What pytest says of one phase of a test."""
    return SimpleNamespace(
        nodeid=nodeid, outcome=outcome, when=when, duration=0.5, user_properties=[*measured.items()]
    )


def test_every_point_of_the_page_is_read():
    """R1 to R22, each with tests."""
    found = points(PAGE.read_text())
    assert [*found] == [f"R{n}" for n in range(1, 23)]
    assert all(what and tests for what, tests in found.values())


def test_outcomes_go_to_their_points():
    """A failure anywhere fails its point; what no point names is listed; nothing run is no pass."""
    collector = Collector(
        {"R1": ["tests/a.py::test_x"], "R2": ["tests/b.py"], "R3": ["tests/c.py"]}
    )
    for phase in (
        report("tests/a.py::test_x[1]", gap=0.25),
        report("tests/a.py::test_x[1]", when="teardown"),
        report("tests/a.py::test_xy"),
        report("tests/b.py::test_1"),
        report("tests/b.py::test_2", "failed", when="setup"),
    ):
        collector.pytest_runtest_logreport(phase)
    verdicts = {name: outcome.verdict() for name, outcome in collector.outcomes.items()}
    assert verdicts == {"R1": "pass", "R2": "FAIL", "R3": "not run", OTHERS: "pass"}


def test_other_points_stay_as_they_were():
    """A run of some points writes their rows and no others; a page with other columns is written anew."""
    facts = {"when": "yesterday", "commit": "abc", "sizes": "full"}
    passed = Outcome(counts={"passed": 2}, seconds=1.2, measured=["gap: 0.25"])
    names, about = ("R1", "R2", OTHERS), {"R1": "x", "R2": "y"}
    page = table(names, new_rows(about, {"R1": passed, "R2": passed}, facts), "a machine")
    assert "| R1 | x | pass | 2 passed | 1 | full | yesterday | abc | gap: 0.25 |" in page
    failed = Outcome(counts={"failed": 1})
    now = new_rows(about, {"R2": failed}, facts | {"when": "today", "sizes": "make test"})
    page = table(names, rows_of(page) | now, "a machine")
    assert "| R1 | x | pass | 2 passed | 1 | full | yesterday | abc | gap: 0.25 |" in page
    assert "| R2 | y | FAIL | 1 failed | 0 | make test | today | abc |  |" in page
    assert rows_of("| point | verdict |\n|---|---|\n| R1 | pass |") == {}


def test_every_test_of_the_folder_belongs_to_a_point():
    """Else its results stand in a row of their own, which a run of single points never writes."""
    named = {test for _, tests in points(PAGE.read_text()).values() for test in tests}
    folder = ROOT / "tests" / "reliability"
    for file in folder.glob("test_*.py"):
        name = file.relative_to(ROOT).as_posix()
        tests = re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
        assert tests
        if name not in named:
            assert not {f"{name}::{test}" for test in tests} - named, name
