"""When an answer counts as late: a multiple of what is usual for the worker and the request's size."""

from __future__ import annotations

from thermocline.remote.lateness import AnswerTimes


def known(**answers):
    """Return times after so many equal answers: kind and pairs -> seconds."""
    times = AnswerTimes()
    for name, seconds in answers.items():
        kind, pairs = name.split("_")
        for _ in range(20):
            times.add(kind == "prompt", int(pairs), seconds)
    return times


def test_a_worker_that_never_answered_is_given_a_second():
    """Of one kind of chunk, too: a prompt's times say nothing of a decode step's."""
    assert AnswerTimes().patience_s(False, 8) == 1.0
    assert known(prompt_8=0.1).patience_s(False, 8) == 1.0


def test_patience_is_a_multiple_with_a_floor():
    """Four times the usual, and not below 30 ms."""
    times = known(decode_8=0.02, decode_64=0.001)
    assert abs(times.patience_s(False, 8) - 0.08) < 1e-9
    assert times.patience_s(False, 64) == 0.03


def test_an_unknown_size_is_judged_by_the_nearest():
    """A larger request has more time, by the ratio; a smaller one as much as the nearest."""
    times = known(prompt_64=0.1)
    assert abs(times.patience_s(True, 256) - 1.6) < 1e-9
    assert abs(times.patience_s(True, 1) - 0.4) < 1e-9


def test_a_slower_worker_gets_more_time_soon_and_a_stopped_one_little():
    """Thirty answers at ten times the usual are enough; one after a minute adds less than double."""
    times = known(decode_8=0.02)
    for _ in range(30):
        times.add(False, 8, 0.2)
    assert times.patience_s(False, 8) > 0.2
    stopped = known(decode_8=0.02)
    stopped.add(False, 8, 60.0)
    assert stopped.patience_s(False, 8) < 0.16
