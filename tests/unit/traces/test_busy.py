"""The counter of a resource's working time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.traces.busy import BusyTime


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=8))
def test_the_total_is_the_work_so_far_at_every_moment(times):
    """However pauses and work follow each other: what is under way counts, pauses do not."""
    busy, now_ns, worked_ns = BusyTime(), 10**15, 0
    for pause_ns, work_ns in times:
        now_ns += pause_ns
        assert busy.total_ns(now_ns) == worked_ns
        busy.begin(now_ns)
        assert busy.total_ns(now_ns + work_ns // 2) == worked_ns + work_ns // 2
        now_ns += work_ns
        busy.end(now_ns)
        worked_ns += work_ns
        assert busy.total_ns(now_ns) == worked_ns


def test_what_was_shown_is_not_taken_back():
    """The end is told late: a reader saw more by then, and sees no less afterwards."""
    busy = BusyTime()
    busy.begin(1000)
    assert busy.total_ns(1500) == 500
    busy.end(1200)
    assert busy.total_ns(1500) == 500
    busy.begin(2000)
    assert [busy.total_ns(now_ns) for now_ns in (2000, 2300, 2400)] == [500, 500, 600]
