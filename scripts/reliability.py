"""Runs the tests that docs/reliability.md names, and writes their results. Usage `python -m scripts.reliability [--quick]`.

Without --quick at the full sizes, which the tests read from the environment. A test may note what it measured with
pytest's `record_property`. Tests in tests/reliability run also if the page does not name them. With --only, the results of
other points stay as they were: each row says when and on which commit it was made.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "docs" / "results" / "reliability.md"
OTHERS = "other"
FULL = {
    "THERMOCLINE_RELIABILITY": "full",
    "THERMOCLINE_FUZZ_FILES": "200000",
    "THERMOCLINE_FUZZ_FRAMES": "10000",
    "THERMOCLINE_WORKER_KILLS": "50",  # for each of two transports
    "THERMOCLINE_API_BODIES": "5000",
    "THERMOCLINE_API_EXAMPLES": "300",
    "THERMOCLINE_SCHEDULES": "10",
    "THERMOCLINE_SOAK_SECONDS": "600",
}


def points(page: str) -> dict[str, tuple[str, list[str]]]:
    """Return what each point is about and its tests, by the point's name."""
    rows = (line.split("|") for line in page.splitlines() if re.match(r"\| R\d+ ", line))
    return {
        row[1].strip(): (row[2].strip(), re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", row[3]))
        for row in rows
    }


@dataclass
class Outcome:
    """What came of the tests of one point."""

    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    measured: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """Return "pass" if something passed and nothing failed."""
        if self.counts.get("failed"):
            return "FAIL"
        return "pass" if self.counts.get("passed") else "not run"


class Collector:
    """A pytest plugin: adds up outcomes by point."""

    def __init__(self, tests: dict[str, list[str]]) -> None:
        self.outcomes = {name: Outcome() for name in (*tests, OTHERS)}
        self._tests = tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test; setup and teardown count only if they fail or skip."""
        outcome = self.outcomes[self._point(report.nodeid)]
        outcome.seconds += report.duration
        if report.when != "call" and report.outcome == "passed":
            return
        outcome.counts[report.outcome] = outcome.counts.get(report.outcome, 0) + 1
        outcome.measured += [f"{name}: {value}" for name, value in report.user_properties]

    def _point(self, nodeid: str) -> str:
        for name, tests in self._tests.items():
            if any(
                nodeid == test or nodeid.startswith((f"{test}[", f"{test}::")) for test in tests
            ):
                return name
        return OTHERS


HEADS = (
    "point",
    "what happens",
    "verdict",
    "tests",
    "seconds",
    "sizes",
    "when",
    "commit",
    "measured",
)


def rows_of(page: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a page of results by point; of a page with other columns none."""
    lines = (
        line.strip().strip("|").split("|") for line in page.splitlines() if line.startswith("|")
    )
    rows = [tuple(cell.strip() for cell in line) for line in lines]
    if not rows or rows[0] != HEADS:
        return {}
    return {row[0]: row for row in rows[2:] if len(row) == len(HEADS)}


def new_rows(
    about: dict[str, str], outcomes: dict[str, Outcome], facts: dict[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return a row for each point that was asked for. facts: sizes, when and commit of all of them."""
    found = {}
    for name, outcome in outcomes.items():
        if name == OTHERS and not outcome.counts:
            continue
        counts = ", ".join(f"{count} {what}" for what, count in outcome.counts.items())
        measured = "; ".join(outcome.measured).replace("|", "/")
        what = about.get(name, "tests that the page does not name")
        made = (facts["sizes"], facts["when"], facts["commit"])
        found[name] = (
            *(name, what, outcome.verdict(), counts, f"{outcome.seconds:.0f}"), *made, measured
        )  # fmt: skip
    return found


def table(names: Iterable[str], rows: dict[str, tuple[str, ...]], machine: str) -> str:
    """Return the page of results: the rows in the order of `names`."""
    lines = ["# Results of the reliability tests", ""]
    lines += [
        "Written by `make reliability`; the points are in [reliability.md](../reliability.md).",
        *("", f"Machine of the last run: {machine}.", ""),
    ]
    shown = [HEADS, ("---",) * len(HEADS), *(rows[name] for name in names if name in rows)]
    lines += [
        f"| {' | '.join(row)} |" if row[0] != "---" else f"|{'|'.join(row)}|" for row in shown
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Return the processor's name and its number of cores."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the commit that is tested, and whether files differ from it."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    )
    return (found.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")


def main(arguments: list[str] | None = None) -> int:
    """Run and write; the status is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reliability", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the sizes of make test")
    parser.add_argument("--only", action="append", metavar="R7", help="a point; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    found = points(PAGE.read_text())
    if unknown := set(options.only or ()) - found.keys():
        parser.error(f"no such point: {', '.join(sorted(unknown))}")
    if not options.quick:
        for name, value in FULL.items():
            os.environ.setdefault(name, value)
    chosen = {
        name: tests
        for name, (_, tests) in found.items()
        if not options.only or name in options.only
    }
    paths = [*dict.fromkeys(test for tests in chosen.values() for test in tests)]
    if not options.only:
        paths.append("tests/reliability")
    collector = Collector(chosen)
    status = pytest.main(
        ["-q", "--timeout", "7200", "-o", "faulthandler_timeout=0", "--rootdir", str(ROOT), *paths],
        plugins=[collector],
    )
    facts = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "sizes": "make test" if options.quick else "full",
    }
    about = {name: what for name, (what, _) in found.items()}
    old = rows_of(options.out.read_text()) if options.only and options.out.exists() else {}
    rows = old | new_rows(about, collector.outcomes, facts)
    load = f"{machine()}; load {os.getloadavg()[0]:.1f} at its end"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table((*found, OTHERS), rows, load))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
