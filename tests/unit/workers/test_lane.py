"""The lane thread: one job at a time, results and errors to the waiter, spans, flows, a clean end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_decode
from thermocline.errors import EngineClosedError
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.timeline import PoolTimeline
from thermocline.messages import LayerIndex
from thermocline.traces.events import FlowEvent, SpanEvent
from thermocline.traces.lanes import Lane, Name
from thermocline.traces.recorder import MemoryRecorder, NullRecorder
from thermocline.workers.completion import ReceivableFuture
from thermocline.workers.lane import LaneThread
from thermocline.workers.lane_queue import Waits

if TYPE_CHECKING:
    from collections.abc import Generator

    from thermocline.messages import Chunk

CHUNK = make_chunk(7)


async def test_jobs_run_in_order_on_one_thread_of_their_own():
    """Results come back, from a thread that is not the loop's."""
    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        jobs = [
            lane.run(Name.COLD, lambda: threading.current_thread().name, CHUNK) for _ in range(3)
        ]
        names = await asyncio.gather(*jobs)
    assert names == ["lane cpu"] * 3


async def test_a_job_s_exception_reaches_its_waiter_and_no_other():
    """The lane survives a failing job."""

    def fail() -> None:
        raise ArithmeticError("as told")

    with LaneThread(Lane.HOT, NullRecorder()) as lane:
        with pytest.raises(ArithmeticError, match="as told"):
            await lane.run(Name.HOT, fail, CHUNK)
        assert await lane.run(Name.HOT, lambda: 5, CHUNK) == 5


async def test_a_cancelled_waiter_does_not_stop_the_job():
    """What a job writes to stays in use until the lane is closed, so closing waits for it."""
    started, release, finished = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        release.wait(5)
        finished.set()

    lane = LaneThread(Lane.HOT, NullRecorder())
    waiter = asyncio.create_task(lane.run(Name.HOT, job, CHUNK))
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
    with LaneThread(Lane.CPU, recorder) as lane:
        for name in (Name.EMBED, Name.ATTEND, Name.HEAD):
            await lane.run(name, partial(sum, range(1000)), CHUNK, LayerIndex(1), rows=2)
    spans = [event for event in recorder.events() if isinstance(event, SpanEvent)]
    flows = [event for event in recorder.events() if isinstance(event, FlowEvent)]
    assert [span.name for span in spans] == [Name.EMBED, Name.ATTEND, Name.HEAD]
    assert spans[0].args == {"chunk": 7, "tokens": 3, "layer": 1, "rows": 2}
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
    assert [(flow.flow_id, flow.phase) for flow in flows] == [(7, "start"), (7, "step"), (7, "end")]


async def test_a_closed_lane_refuses_work():
    """Work after the end is an error, not a hang."""
    lane = LaneThread(Lane.HOT, NullRecorder())
    lane.close()
    lane.close()
    with pytest.raises(EngineClosedError, match="closed"):
        await lane.run(Name.HOT, int, CHUNK)


async def driven(lane: LaneThread, steps: Generator[Any, None, Any], chunk: Chunk) -> Any:
    """Take a chunk through its steps, as a task."""
    return await lane.drive(steps, chunk)


async def test_a_chunk_has_the_lane_to_itself_and_its_jobs_run_at_once():
    """What a decode step's stages run on the lane does not queue behind the step itself."""
    with LaneThread(Lane.CPU, NullRecorder()) as lane:

        def step() -> Generator[None, None, list[str]]:
            names: list[str] = []
            for _ in range(3):
                coroutine = lane.run(Name.COLD, lambda: threading.current_thread().name, CHUNK)
                with pytest.raises(StopIteration) as done:
                    coroutine.send(None)
                names.append(done.value.value)
                yield
            return names

        assert await lane.drive(step(), make_decode(CHUNK)) == ["lane cpu"] * 3


async def test_chunks_take_turns_in_order():
    """Where a prompt yields, a decode step goes first, then prompts in the order of their start."""
    order, started, ready = [], threading.Event(), threading.Event()

    def prompt(name: str) -> Generator[None, None, None]:
        for turn in range(3):
            started.set()
            assert ready.wait(5)
            order.append(f"{name}{turn}")
            yield

    def decode() -> Generator[None, None, None]:
        order.append("decode")
        yield from ()

    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        async with asyncio.TaskGroup() as group:
            group.create_task(driven(lane, prompt("a"), CHUNK))
            await asyncio.to_thread(started.wait, 5)
            group.create_task(driven(lane, prompt("b"), CHUNK))
            group.create_task(driven(lane, decode(), make_decode(CHUNK)))
            await asyncio.sleep(0)
            ready.set()
    assert order == ["a0", "decode", "b0", "a1", "b1", "a2", "b2"]


async def test_a_prompt_that_waits_leaves_the_lane_to_others():
    """What it waits for brings it back; a lane that is closed meanwhile takes it to its end."""
    order: list[str] = []
    waits: Future[None] = Future()

    def prompt(name: str, *futures: Future[None]) -> Generator[Waits | None, None, str]:
        order.append(f"{name} begins")
        if futures:
            yield Waits(futures)
        order.append(f"{name} ends")
        return name

    lane = LaneThread(Lane.CPU, NullRecorder())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(driven(lane, prompt("a", waits, Future()), CHUNK))
        await asyncio.sleep(0)
        assert await lane.drive(prompt("b"), CHUNK) == "b"
        closed = group.create_task(asyncio.to_thread(lane.close))
        waits.set_result(None)
        assert await waiting == "a"
        await closed
    assert order == ["a begins", "b begins", "b ends", "a ends"]


async def test_a_decode_step_keeps_the_lane_while_it_waits():
    """A prompt that came meanwhile begins behind it."""
    order: list[str] = []
    begun, waits = threading.Event(), Future()

    def decode() -> Generator[Waits, None, None]:
        begun.set()
        yield Waits((waits,))
        order.append("decode")

    def prompt() -> Generator[None, None, None]:
        order.append("prompt")
        yield from ()

    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        async with asyncio.TaskGroup() as group:
            group.create_task(driven(lane, decode(), make_decode(CHUNK)))
            await asyncio.to_thread(begun.wait, 5)
            group.create_task(driven(lane, prompt(), CHUNK))
            await asyncio.sleep(0)
            waits.set_result(None)
    assert order == ["decode", "prompt"]


async def test_a_lane_fetches_what_a_decode_step_waits_for():
    """With nothing else to run it receives a step's answer on its own thread; a prompt's answer it is woken for."""
    fetched: list[tuple[str, str]] = []

    class Answer(ReceivableFuture[None]):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def receive(self, is_wanted):
            fetched.append((self._name, threading.current_thread().name))
            assert is_wanted()
            self.set_result(None)

    def waits(answer: Answer) -> Generator[Waits, None, str]:
        yield Waits((answer,))
        return answer._name

    prompts = Answer("prompt")
    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        assert await lane.drive(waits(Answer("step")), make_decode(CHUNK)) == "step"
        driven = asyncio.ensure_future(lane.drive(waits(prompts), make_chunk(1)))
        await lane.run(Name.COLD, lambda: None, make_chunk(2))
        prompts.set_result(None)
        assert await driven == "prompt"
    assert fetched == [("step", f"lane {Lane.CPU}")]


async def test_what_a_decode_step_waits_for_may_wait_for_a_prompt():
    """A prompt that goes on after another lane's work does so while the step keeps the lane, and sets it free."""
    order: list[str] = []
    prompt_begun, begun, others, slot = threading.Event(), threading.Event(), Future(), Future()

    def prompt() -> Generator[Waits | None, None, None]:
        prompt_begun.set()
        yield Waits((others,))
        order.append("prompt goes on")
        slot.set_result(None)
        yield None
        order.append("prompt ends")

    def decode() -> Generator[Waits, None, None]:
        begun.set()
        yield Waits((slot,))
        order.append("decode")

    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(driven(lane, prompt(), CHUNK))
            await asyncio.to_thread(prompt_begun.wait, 5)
            group.create_task(driven(lane, decode(), make_decode(CHUNK)))
            await asyncio.to_thread(begun.wait, 5)
            others.set_result(None)
    assert order == ["prompt goes on", "decode", "prompt ends"]


async def test_a_decode_step_overtakes_prompts_that_wait():
    """A prompt's next job waits for the step; the prompt's present job is not stopped."""
    order, started, release = [], threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        release.wait(5)
        order.append("prompt 0")

    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        async with asyncio.TaskGroup() as group:
            group.create_task(lane.run(Name.COLD, first, CHUNK))
            await asyncio.to_thread(started.wait, 5)
            for number in (1, 2):
                job = partial(order.append, f"prompt {number}")
                group.create_task(lane.run(Name.COLD, job, CHUNK))
            decode = partial(order.append, "decode")
            group.create_task(lane.run(Name.COLD, decode, make_decode(CHUNK)))
            await asyncio.sleep(0)
            release.set()
    assert order[:2] == ["prompt 0", "decode"]
    assert order[2:] == ["prompt 1", "prompt 2"]


async def test_a_pool_s_threads_are_shown_each_with_what_it_did():
    """With a timeline the spans are the threads' own, inside of the job, and none is the job's wait."""
    recorder, kernels = MemoryRecorder(64), NativeKernels(threads=2)
    x = np.ones((64, 512), np.float32)
    timeline = PoolTimeline(kernels._core)
    with LaneThread(Lane.CPU, recorder, timeline=timeline) as lane:
        start_ns = recorder.now_ns()

        def job() -> None:
            for _ in range(20):
                kernels.dense.rms_norm(x, x[0], 1e-6)

        await lane.run(Name.ATTEND, job, CHUNK, LayerIndex(0))
        end_ns = recorder.now_ns()
    spans = [event for event in recorder.events() if isinstance(event, SpanEvent)]
    assert {span.index for span in spans} <= {0, 1}
    assert len(spans) >= 20, "each of the jobs was some thread's"
    assert {span.name for span in spans} == {Name.ATTEND}
    assert all(start_ns <= span.start_ns <= span.end_ns <= end_ns for span in spans)


async def test_a_lane_counts_its_working_time():
    """Of a lane without a pool, the time of its jobs; none while it waits."""
    with LaneThread(Lane.HOT, NullRecorder()) as lane:
        (track,) = lane.busy_ns()
        assert (track.label, lane.busy_ns()[track]) == ("hot", 0)
        during: list[int] = []
        await lane.run(
            Name.HOT, lambda: during.extend(lane.busy_ns()[track] for _ in range(3)), CHUNK
        )
        assert 0 < during[0] < during[1] < during[2]
    assert lane.busy_ns()[track] == lane.busy_ns()[track] >= during[2]


async def test_a_pool_s_lane_counts_each_of_its_threads():
    """With a pool, the tracks are its threads, as in the trace, whether or not it is recorded."""
    kernels = NativeKernels(threads=2)
    x = np.ones((64, 512), np.float32)
    with LaneThread(Lane.CPU, NullRecorder(), timeline=kernels.timeline()) as lane:
        await lane.run(Name.ATTEND, lambda: kernels.dense.rms_norm(x, x[0], 1e-6), CHUNK)
        busy = lane.busy_ns()
    assert [track.label for track in busy] == ["cpu 0", "cpu 1"]
    assert sum(busy.values()) > 0


async def test_spare_work_fills_what_chunks_leave_and_urgent_work_goes_first():
    """Each turn lets a chunk's job or something urgent pass; results and errors arrive in futures."""
    order, started, gate = [], threading.Event(), threading.Event()

    def work(name: str, turns: int) -> Generator[None, None, str]:
        for _ in range(turns):
            order.append(name)
            yield
        return name

    def fail() -> Generator[None, None, None]:
        yield
        raise ArithmeticError("as told")

    def wait() -> Generator[None, None, None]:
        started.set()
        gate.wait(5)
        yield

    with LaneThread(Lane.GPU_H2D, NullRecorder()) as lane:
        first = lane.submit_background(wait())
        started.wait(5)
        calm, urgent = (
            lane.submit_background(work("calm", 2)),
            lane.submit_background(work("urgent", 2), urgent=True),
        )
        other = asyncio.create_task(lane.run(Name.COPY, partial(order.append, "chunk"), CHUNK))
        await asyncio.sleep(0)
        gate.set()
        await other
        assert (first.result(5), calm.result(5), urgent.result(5)) == (None, "calm", "urgent")
        with pytest.raises(ArithmeticError, match="as told"):
            lane.submit_background(fail()).result(5)
    assert order == ["chunk", "urgent", "urgent", "calm", "calm"]


async def test_work_that_is_begun_runs_beside_its_caller():
    """Nobody has to wait for it; its result, or its error, is there for any thread; a closed lane refuses."""
    gate = threading.Event()
    with LaneThread(Lane.GPU_H2D, MemoryRecorder(16)) as lane:
        held = lane.begin(Name.COPY, lambda: gate.wait(5), CHUNK, bytes=8)
        failed = lane.begin(Name.COPY, lambda: 1 // 0, CHUNK)
        assert not held.done()
        gate.set()
        assert held.result(5) is True
        with pytest.raises(ZeroDivisionError):
            failed.result(5)
        (span,) = (one for one in lane._recorder.events() if getattr(one, "args", {}).get("bytes"))
        assert (span.lane, span.name) == (Lane.GPU_H2D, Name.COPY)
    with pytest.raises(EngineClosedError):
        lane.begin(Name.COPY, gate.wait, CHUNK)


def test_spare_work_ends_with_its_lane():
    """What is not done when the lane closes fails, and so does what comes later."""
    started, gate = threading.Event(), threading.Event()

    def forever() -> Generator[None, None, None]:
        while True:
            started.set()
            gate.wait(5)
            yield

    lane = LaneThread(Lane.GPU_H2D, NullRecorder())
    busy, waiting = lane.submit_background(forever()), lane.submit_background(forever())
    started.wait(5)
    gate.set()
    lane.close()
    for future in (busy, waiting):
        assert isinstance(future.exception(5), EngineClosedError)
    with pytest.raises(EngineClosedError):
        lane.submit_background(forever())


def test_what_fails_with_nobody_waiting_is_logged(caplog):
    """A job that was only started has no waiter: its error is in the log, and the lane goes on."""

    def fail() -> None:
        raise OSError("nobody waits for this")

    with LaneThread(Lane.HOT, NullRecorder()) as lane:
        lane.start(fail, make_chunk(0))
        assert lane.submit_background(iter_once()).result(10) is None
    assert "nobody waits for this" in caplog.text


def iter_once():
    yield from ()
