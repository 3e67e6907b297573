"""The lane thread: one job at a time, results and errors to the waiter, spans, flows, a clean end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from functools import partial

import pytest

from thermocline.errors import EngineClosedError
from thermocline.kernels.lane import LaneThread
from thermocline.traces.events import FlowEvent, SpanEvent
from thermocline.traces.lanes import Lane, Name
from thermocline.traces.recorder import MemoryRecorder, NullRecorder


async def test_jobs_run_in_order_on_one_thread_of_their_own():
    """Results come back, from a thread that is not the loop's."""
    with LaneThread(Lane.CPU_COLD, NullRecorder()) as lane:
        jobs = [lane.run(Name.COLD, lambda: threading.current_thread().name) for _ in range(3)]
        names = await asyncio.gather(*jobs)
    assert names == ["lane cpu.cold"] * 3


async def test_a_job_s_exception_reaches_its_waiter_and_no_other():
    """The lane survives a failing job."""

    def fail() -> None:
        raise ArithmeticError("as told")

    with LaneThread(Lane.HOT, NullRecorder()) as lane:
        with pytest.raises(ArithmeticError, match="as told"):
            await lane.run(Name.HOT, fail)
        assert await lane.run(Name.HOT, lambda: 5) == 5


async def test_a_cancelled_waiter_does_not_stop_the_job():
    """What a job writes to stays in use until the lane is closed, so closing waits for it."""
    started, release, finished = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        release.wait(5)
        finished.set()

    lane = LaneThread(Lane.HOT, NullRecorder())
    waiter = asyncio.create_task(lane.run(Name.HOT, job))
    await asyncio.to_thread(started.wait, 5)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    release.set()
    lane.close()
    assert finished.is_set()


async def test_spans_are_busy_time_and_flows_follow_the_chunk():
    """One span per job, none overlapping; a chunk's arrow starts at embed and ends at head."""
    recorder = MemoryRecorder(64)
    with LaneThread(Lane.CPU_TRUNK, recorder) as lane:
        for name in (Name.EMBED, Name.ATTEND, Name.HEAD):
            await lane.run(name, partial(sum, range(1000)), {"chunk": 7})
        await lane.run(Name.ROUTER, int, {"layer": 1})
    spans = [event for event in recorder.events() if isinstance(event, SpanEvent)]
    flows = [event for event in recorder.events() if isinstance(event, FlowEvent)]
    assert [span.name for span in spans] == [Name.EMBED, Name.ATTEND, Name.HEAD, Name.ROUTER]
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
    assert [(flow.flow_id, flow.phase) for flow in flows] == [(7, "start"), (7, "step"), (7, "end")]


async def test_a_closed_lane_refuses_work():
    """Work after the end is an error, not a hang."""
    lane = LaneThread(Lane.HOT, NullRecorder())
    lane.close()
    lane.close()
    with pytest.raises(EngineClosedError, match="closed"):
        await lane.run(Name.HOT, int)
