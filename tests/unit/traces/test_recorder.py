"""Claims about the recorders: what is kept, what is dropped, what is refused."""

import threading

import numpy as np
import pytest

from tests.support.fake_clock import FakeClock
from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    FlowEvent,
    InstantEvent,
    SpanEvent,
)
from thermocline.traces.lanes import WORK_LANES, Lane, Name
from thermocline.traces.recorder import MemoryRecorder, NullRecorder, Recorder


def _report_one_of_each(recorder: Recorder) -> None:
    recorder.span(Lane.CPU, Name.COLD, 10, 20, {"layer": 3})
    recorder.instant(Lane.SCHEDULER, Name.STEP, 11)
    recorder.counter("channel router->cold", 2, 12)
    recorder.flow(7, Lane.CPU, 13, "end")
    recorder.async_span(Name.REQUEST, 5, 1, 30, {"tokens": 4})
    notes = [np.array([[3, 5, 0]]), np.array([[6, 9, 1]])]
    recorder.pool_job(Lane.CPU, (Name.ATTEND, Name.COLD), notes, {"layer": 2}, 7, "step")


def test_events_come_back_typed_and_in_order():
    """A snapshot holds one typed event per call, a pool's job several, in the order of the calls."""
    recorder = MemoryRecorder(8, FakeClock())
    _report_one_of_each(recorder)
    assert recorder.events() == [
        SpanEvent(Lane.CPU, Name.COLD, 10, 20, {"layer": 3}),
        InstantEvent(Lane.SCHEDULER, Name.STEP, 11, None),
        CounterEvent("channel router->cold", 2, 12),
        FlowEvent(7, Lane.CPU, 13, "end"),
        AsyncSpanEvent(Name.REQUEST, 5, 1, 30, {"tokens": 4}),
        FlowEvent(7, Lane.CPU, 3, "step"),
        SpanEvent(Lane.CPU, Name.ATTEND, 3, 5, {"layer": 2}),
        SpanEvent(Lane.CPU, Name.COLD, 6, 9, {"layer": 2}, 1),
    ]


def test_null_recorder_keeps_nothing():
    """The null recorder takes every call, says that it is off, and has no events."""
    recorder = NullRecorder()
    _report_one_of_each(recorder)
    recorder.clear()
    assert recorder.events() == []
    assert not recorder.enabled
    assert recorder.now_ns() == 0


def test_the_arrow_points_to_whichever_thread_worked():
    """A thread without work has no span; a job that nobody noted leaves neither span nor arrow."""
    recorder = MemoryRecorder(8, FakeClock())
    nothing = np.empty((0, 3), np.int64)
    worked = [nothing, np.array([[1, 2, 0]])]
    recorder.pool_job(Lane.CPU, (Name.COLD,), worked, {}, 3, "start")
    recorder.pool_job(Lane.CPU, (Name.COLD,), [nothing, nothing], {}, 3, "end")
    assert recorder.events() == [
        FlowEvent(3, Lane.CPU, 1, "start", 1),
        SpanEvent(Lane.CPU, Name.COLD, 1, 2, {}, 1),
    ]


def test_a_pool_s_job_outside_of_the_vocabulary_is_refused():
    """Free text is neither a lane nor a part."""
    recorder = MemoryRecorder(4, FakeClock())
    with pytest.raises(TypeError, match="cpu"):
        recorder.pool_job("cpu", (Name.COLD,), [], {}, 1, "step")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cold"):
        recorder.pool_job(Lane.CPU, ("cold",), [], {}, 1, "step")  # type: ignore[arg-type]
    assert recorder.events() == []


def test_ring_drops_the_oldest_and_counts_them():
    """With room for four, the last four of eleven events remain and seven are counted as dropped."""
    recorder = MemoryRecorder(4, FakeClock())
    for at_ns in range(11):
        recorder.instant(Lane.LOOP, Name.STEP, at_ns)
    assert [event.at_ns for event in recorder.events()] == [7, 8, 9, 10]
    assert recorder.dropped == 7
    assert repr(recorder) == "MemoryRecorder(kept=4/4, dropped=7)"


def test_clear_forgets_events_and_drops():
    """After clear the ring is empty, nothing counts as dropped, and recording goes on."""
    recorder = MemoryRecorder(3, FakeClock())
    for at_ns in range(5):
        recorder.instant(Lane.LOOP, Name.STEP, at_ns)
    recorder.clear()
    assert (recorder.events(), recorder.dropped) == ([], 0)
    for at_ns in range(100, 104):
        recorder.instant(Lane.LOOP, Name.STEP, at_ns)
    assert [event.at_ns for event in recorder.events()] == [101, 102, 103]
    assert recorder.dropped == 1


def test_time_is_that_of_the_clock():
    """now_ns reads the clock that was passed in."""
    clock = FakeClock(3)
    recorder = MemoryRecorder(1, clock)
    clock.advance(4)
    assert recorder.now_ns() == 7
    assert recorder.enabled
    assert recorder.capacity == 1


@pytest.mark.parametrize(
    ("lane", "name", "word"),
    [("gpu.compute", Name.HOT, "gpu.compute"), (Lane.HOT, "hot", "hot"), (Lane.HOT, None, "None")],
)
def test_free_text_is_refused(lane, name, word):
    """A lane or name that is not a member of the vocabulary is a TypeError, whatever it spells."""
    recorder = MemoryRecorder(4, FakeClock())
    with pytest.raises(TypeError, match=word):
        recorder.span(lane, name, 0, 1)
    with pytest.raises(TypeError, match=word):
        recorder.instant(lane, name, 0)
    assert recorder.events() == []


def test_free_text_is_refused_in_flows_async_spans_and_counters():
    """The other calls check their part of the vocabulary too."""
    recorder = MemoryRecorder(4, FakeClock())
    with pytest.raises(TypeError, match="loop"):
        recorder.flow(1, "loop", 0, "start")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="request"):
        recorder.async_span("request", 1, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name is a string"):
        recorder.counter(3, 1.0, 0)  # type: ignore[arg-type]
    assert recorder.events() == []


def test_impossible_values_are_refused():
    """A span that ends before it starts, a counter without a value and an unknown phase are refused."""
    recorder = MemoryRecorder(4, FakeClock())
    with pytest.raises(ValueError, match="ends 1 ns before it starts"):
        recorder.span(Lane.HOT, Name.HOT, 5, 4)
    with pytest.raises(ValueError, match="ends 2 ns before it starts"):
        recorder.async_span(Name.REQUEST, 1, 5, 3)
    with pytest.raises(ValueError, match="no finite value"):
        recorder.counter("rate", float("nan"), 0)
    with pytest.raises(ValueError, match="'begin'"):
        recorder.flow(1, Lane.HOT, 0, "begin")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        MemoryRecorder(0, FakeClock())
    assert recorder.events() == []


def test_threads_share_the_ring_without_losing_events():
    """Four threads write at once: every event is kept once, each thread's in its own order."""
    recorder = MemoryRecorder(4000, FakeClock())
    barrier = threading.Barrier(4)

    def write(first: int) -> None:
        barrier.wait()
        for at_ns in range(first, first + 1000):
            recorder.instant(Lane.LOOP, Name.STEP, at_ns)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(0, 4000, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = [event.at_ns for event in recorder.events()]
    assert sorted(times) == list(range(4000))
    assert recorder.dropped == 0
    for first in range(0, 4000, 1000):
        assert [t for t in times if first <= t < first + 1000] == list(range(first, first + 1000))


def test_vocabulary_has_no_duplicates_and_knows_the_work():
    """Values are unique, and bookkeeping lanes are not work."""
    assert len({lane.value for lane in Lane}) == len(Lane.__members__)
    assert len({name.value for name in Name}) == len(Name.__members__)
    assert set(Lane) - WORK_LANES == {Lane.REQUESTS, Lane.LOOP, Lane.SCHEDULER, Lane.DRAFT}


def test_a_recorder_that_is_off_keeps_nothing_and_takes_no_memory():
    """Off, all six kinds of events vanish, and the ring is not there."""
    recorder = MemoryRecorder(1 << 20, FakeClock(), enabled=False)
    _report_one_of_each(recorder)
    assert recorder.events() == []
    assert len(recorder._ring) == 1


def test_recording_can_be_started_and_stopped_again_and_again():
    """Each window holds what came between its start and its stop; stopping gives the memory back."""
    clock = FakeClock(100)
    recorder = MemoryRecorder(4, clock, enabled=False)
    for number in range(3):
        recorder.instant(Lane.LOOP, Name.STEP, 1)
        recorder.start()
        for at_ns in range(number * 3):
            recorder.instant(Lane.LOOP, Name.PLAN, at_ns)
        events, num_dropped = recorder.stop()
        assert {event.name for event in events} <= {Name.PLAN}
        assert (len(events), num_dropped) == [(0, 0), (3, 0), (4, 2)][number]
        assert not recorder.enabled
        assert len(recorder._ring) == 1


def test_what_began_before_the_recording_is_shown_from_its_start_on():
    """A request that runs for long before the window does not stretch it."""
    clock = FakeClock(1000)
    recorder = MemoryRecorder(4, clock, enabled=False)
    recorder.start()
    recorder.async_span(Name.REQUEST, 1, 10, 1500)
    assert recorder.stop()[0] == [AsyncSpanEvent(Name.REQUEST, 1, 1000, 1500)]


def test_starting_and_stopping_beside_writers_loses_no_consistency():
    """Four threads write while a fifth switches: each window's events are whole and in order."""
    recorder = MemoryRecorder(64, enabled=False)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            recorder.instant(Lane.LOOP, Name.STEP, recorder.now_ns(), {"a": 1})

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        recorder.start()
        events, num_dropped = recorder.stop()
        assert len(events) <= 64
        assert num_dropped >= 0
        assert all(type(event) is InstantEvent and event.args == {"a": 1} for event in events)
    done.set()
    for thread in threads:
        thread.join()
