"""What the comparison with KTransformers says of its measurements; measuring itself needs that package."""

from __future__ import annotations

from benchmarks.against_kt import report

ONE, TWO = "kt-kernel, 1 threads", "kt-kernel, 2 threads"


def times(ours, one, two):
    """Milliseconds of one case by side."""
    return {(1, "thermocline"): ours, (1, ONE): one, (1, TWO): two}


ERRORS = {1: {"thermocline": 0.009, ONE: 0.017, TWO: 0.017}}


def test_the_faster_number_of_threads_counts(capsys):
    """Ours is compared with their best; every side's times are kept."""
    rows, faster = report(times([1.0, 1.5, 1.2], [3.0, 3.0, 3.0], [9.0, 8.0, 7.0]), ERRORS, "")
    assert faster
    ratio = next(row for row in rows if row.side == "ratio")
    assert ratio.values == (3.0, 2.0, 2.5)
    assert ONE in ratio.metric
    assert {row.side for row in rows} == {"thermocline", ONE, TWO, "ratio"}
    assert "2.50 (2.00 to 3.00)" in capsys.readouterr().out


def test_slower_in_one_case_is_slower(capsys):
    """A median below 1 is a failure, however fast single runs were."""
    _, faster = report(times([4.0, 1.0, 4.0], [3.0, 3.0, 3.0], [2.0, 2.0, 2.0]), ERRORS, "")
    assert not faster
    assert TWO in capsys.readouterr().out
