"""Figures are summarised and kept as the tables say."""

from __future__ import annotations

import csv

import pytest

from benchmarks.measure import ForeignLoad, Row, paired_ratios, spread, table, write_rows

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


def test_own_work_is_not_foreign():
    """A loop of this process counts as its own: far less than the one core that it used."""
    with ForeignLoad() as load:
        total = sum(range(2_000_000))
    assert total > 0
    assert "other programs used" in str(load)
    assert load.cores >= 0.0
