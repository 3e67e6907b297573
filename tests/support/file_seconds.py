"""Processor seconds of each file of tests: the slowest are told at the end of a run, so that growth is seen.

A plugin of pytest, in every process of a run. Seconds of processes that a test started and waited for count; those of
collection have a line of their own.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

_COLLECTED = "collected_seconds"


def processor_seconds() -> float:
    """Return what this process and the children that it waited for have taken."""
    return sum(os.times()[:4])


class FileSeconds:
    """Adds to each test's last report what the test took, and tells the sums by file where the run is reported."""

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._last = self._collected = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what imports and collection took."""
        self._last = self._collected = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        """Note what was taken since the last test's end; xdist sends a report's attributes along."""
        report = yield
        if report.when != "teardown":  # to ask the system takes up to a millisecond
            return report
        now = processor_seconds()
        report.processor_seconds, self._last = now - self._last, now
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what collection took to the process that reports."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_COLLECTED] = self._collected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Add up what the processes sent."""
        self._collected += getattr(node, "workeroutput", {}).get(_COLLECTED, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Tell the sum, and the files that took most of it."""
        files: Counter[str] = Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                seconds = getattr(report, "processor_seconds", 0.0)
                files[getattr(report, "nodeid", "").partition("::")[0]] += seconds
        total = files.total() + self._collected
        if self._num_shown and total:
            terminalreporter.section(f"{total:.0f} processor seconds, by file")
            terminalreporter.line(f"{self._collected:6.1f}  imports and collection")
            for name, seconds in files.most_common(self._num_shown):
                terminalreporter.line(f"{seconds:6.1f}  {name}")
