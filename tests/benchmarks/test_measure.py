"""Figures are summarised and kept as the tables say."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
import threading

import pytest

from benchmarks import measure
from benchmarks.measure import (
    ForeignLoad,
    Peak,
    QuietRounds,
    Row,
    paired_ratios,
    spread,
    table,
    write_rows,
)

FACTS = {"commit": "abc", "cpu": "a, b"}


def test_ratios_are_of_neighbours():
    """Each ratio is of the two that were measured next to each other, and a missing one is an error."""
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == (2.0, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([1.0, 2.0], [1.0])


def test_a_spread_names_median_and_extremes():
    """The median is not the mean, and both ends are told."""
    assert spread([1.0, 2.0, 30.0]) == "2.0 (1.0 to 30.0)"


def test_a_table_lines_up():
    """All lines are equally long, and the rule has as many columns as the header."""
    lines = table(("name", "x"), [("a", "1"), ("longer", "100")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.count("|") for line in lines] == [3, 3, 3, 3]


def test_rows_are_appended_under_one_header(tmp_path):
    """A second run adds to the file; values, their order and the machine's facts come back."""
    path = tmp_path / "new" / "rows.csv"
    row = Row("b", "case", "us", "speed", "tokens/s", (3.0, 1.0, 2.0), "note, with comma")
    write_rows(path, [row], FACTS)
    write_rows(path, [row, row], FACTS)
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 3
    assert found[0]["median"] == "2"
    assert found[0]["values"] == "3 1 2"
    assert found[2]["note"] == "note, with comma"
    assert found[2]["cpu"] == "a, b"


def test_a_new_column_leaves_earlier_rows_as_they_were(tmp_path):
    """A fact that a file did not have is empty in what it had; one that is not told any more, in what is new."""
    path = tmp_path / "rows.csv"
    row = Row("b", "case", "us", "speed", "tokens/s", (3.0, 1.0, 2.0), "note, with comma")
    write_rows(path, [row], FACTS)
    write_rows(path, [row], {"cpu": "a, b", "disturbed_rounds": "1"})
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["commit"], first["cpu"], first["disturbed_rounds"]) == ("abc", "a, b", "")
    assert (second["commit"], second["cpu"], second["disturbed_rounds"]) == ("", "a, b", "1")
    assert first["values"] == second["values"] == "3 1 2"
    assert [one.name for one in tmp_path.iterdir()] == ["rows.csv"]


def test_a_commit_is_dirty_by_what_is_measured(tmp_path):
    """New results and the pages that quote them leave a commit clean; a changed program does not."""

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    program, found = tmp_path / "program.py", tmp_path / "docs" / "results" / "rows.csv"
    found.parent.mkdir(parents=True)
    for path in (program, found, tmp_path / "README.md"):
        path.write_text("1")
    git("init")
    assert measure._commit(tmp_path) == "unknown"
    git("add", ".")
    git("commit", "-m", "first")
    commit = measure._commit(tmp_path)
    assert len(commit) >= 7
    found.write_text("2")
    (tmp_path / "README.md").write_text("2")
    assert measure._commit(tmp_path) == commit
    program.write_text("2")
    assert measure._commit(tmp_path) == f"{commit}-dirty"


def test_foreign_load_is_what_others_did(monkeypatch):
    """Busy seconds of the machine without our own, over the time that passed; beyond a tenth, marked."""
    clock, busy, own = (
        iter([0.0, 4.0, 10.0, 14.0]),
        iter([10.0, 16.0, 20.0, 24.2]),
        iter([5, 9, 9, 13]),
    )
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measure, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(measure, "_own_s", lambda: float(next(own)))
    with ForeignLoad() as load:
        pass
    assert load.cores == pytest.approx(0.5)
    assert "DISTURBED" in str(load)
    with ForeignLoad() as load:
        pass
    assert load.cores == pytest.approx(0.05)
    assert "DISTURBED" not in str(load)


def test_a_child_that_ended_counts_as_own():
    """What a child process computed is in our sum after it ended."""
    before = measure._own_s()
    program = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    # Each of its figures is cut to a clock's tick of 10 ms.
    assert measure._own_s() - before >= 0.25


def loads(monkeypatch, *cores):
    """Let the next rounds find these foreign loads; a round lasts a second."""
    clock = itertools.count()
    found = iter([value for load in cores for value in (0.0, load)])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(measure, "_busy_s", lambda: next(found))
    monkeypatch.setattr(measure, "_own_s", lambda: 0.0)


def counted(rounds):
    """Run the rounds; return which of them count."""
    counts = []
    for one in rounds:
        with one:
            pass
        counts.append((one.number, one.counts))
    return counts


def test_disturbed_rounds_are_repeated(monkeypatch):
    """A warm-up never counts, a disturbed round is taken again, and both are told."""
    loads(monkeypatch, 0.0, 0.0, 0.5, 0.08)
    rounds = QuietRounds(2)
    assert counted(rounds) == [(-1, False), (0, True), (1, False), (1, True)]
    assert rounds.facts() == {"foreign_cores": "0.04", "disturbed_rounds": "1"}
    assert "1 disturbed rounds do not count" in str(rounds)
    assert "DISTURBED" not in str(rounds)


def test_a_machine_that_is_never_idle_gets_marked_figures(monkeypatch):
    """After the patience is used up every round counts, and the text says how disturbed it was."""
    loads(monkeypatch, *[0.5] * 4)
    rounds = QuietRounds(2, warm_ups=0, patience=1.0)
    assert counted(rounds) == [(0, False), (0, False), (0, True), (1, True)]
    assert "DISTURBED" in str(rounds)


def test_a_round_that_fails_says_so():
    """What is raised inside a round reaches the benchmark."""
    one = next(iter(QuietRounds(1)))
    with pytest.raises(RuntimeError, match="broken"), one:
        raise RuntimeError("broken")


def test_the_peak_is_the_most_that_was_seen():
    """Whatever is seen at the end."""
    looks, over = iter([5, 9, 7]), threading.Event()

    def look():
        seen = next(looks, None)
        if seen is None:
            over.set()
        return seen or 6

    with Peak(look, 1e-4) as peak:
        assert over.wait(10)
    assert peak.value == 9
