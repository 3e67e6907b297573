"""One thread per resource: jobs run on it one at a time, and its lane of the trace shows what they did.

A coroutine awaits a job while the event loop, or another lane, stays free. What other threads want of a lane comes
through one inbox. Decode steps and prompts take turns. Knows nothing of what the jobs compute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from asyncio import _get_running_loop as running_loop  # get_running_loop costs an exception here
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from thermocline.errors import EngineClosedError
from thermocline.kernels.native import load_native
from thermocline.traces.busy import BusyTime
from thermocline.traces.lanes import Lane, Name, Track
from thermocline.workers.completion import Completion, ReceivableFuture
from thermocline.workers.lane_queue import LaneJob, LaneQueue, Resumption, Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.kernels.timeline import PoolTimeline
    from thermocline.messages import Chunk, ChunkId, LayerIndex
    from thermocline.traces.events import FlowPhase
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.completion import AnyFuture
    from thermocline.workers.lane_queue import Pause, Stop

R = TypeVar("R")
_LOG: Final = logging.getLogger("thermocline.workers")

# Jobs whose times are kept for whoever asks.
_MAX_TIMES = 4096


class JobLane(Protocol):
    """Where stages have their work done."""

    async def run(
        self,
        name: Name,
        job: Callable[[], R],
        chunk: Chunk,
        layer: LayerIndex | None = None,
        **counts: int,
    ) -> R:
        """Run `job` on the lane and return its result; layer and counts go to the trace."""
        ...


@dataclass(frozen=True, slots=True)
class _Work:
    """A job as the trace shows it."""

    name: Name
    chunk: Chunk
    layer: LayerIndex | None
    counts: Mapping[str, int]
    layer_spans: Callable[[], NDArray[np.int64]] | None = None

    def args(self) -> dict[str, int | float | str]:
        args: dict[str, int | float | str] = {
            "chunk": self.chunk.id,
            "tokens": self.chunk.num_tokens,
        }
        if self.layer is not None:
            args["layer"] = self.layer
        args.update(self.counts)
        return args


class LaneThread:
    """A thread that is one resource. Close it (or leave its context) to end the thread.

    timeline: what the pool's threads did, where jobs compute on a pool; else the job's own time is shown.
    slowdown: see `PrefillDecodeArbiter`.
    """

    def __init__(
        self,
        lane: Lane,
        recorder: Recorder,
        *,
        timeline: PoolTimeline | None = None,
        slowdown: float = 2.0,
    ) -> None:
        self.lane = lane
        self._recorder = recorder
        self._timeline = timeline
        # Jobs of these two compute in the core alone; others wait for devices and timers in Python.
        self._inbox = load_native().Inbox(lane in (Lane.CPU, Lane.HOT))
        # Held to put a job and to close: no job comes after the end.
        self._gate = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        self._times: deque[tuple[ChunkId, float]] = deque(maxlen=_MAX_TIMES)
        self._busy = BusyTime()
        # What a decode step waits for and this thread can fetch.
        self._fetched: tuple[ReceivableFuture[Any], ...] = ()
        self._queue = LaneQueue(slowdown)
        self._thread = threading.Thread(target=self._work, name=f"lane {lane}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._queue)} waiting"
        return f"LaneThread({self.lane}, {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def run(
        self,
        name: Name,
        job: Callable[[], R],
        chunk: Chunk,
        layer: LayerIndex | None = None,
        **counts: int,
    ) -> R:
        """Run `job` on this lane's thread and return its result.

        On that very thread (see `drive`) it runs at once. On another thread without an event loop the
        coroutine yields a Completion to whoever drives it. A job whose waiter is cancelled still
        runs to its end: what it writes to stays valid until the lane is closed. Raises what the job
        raises, EngineClosedError after `close`.
        """
        return await self._run_work(_Work(name, chunk, layer, counts), job)

    async def run_layers(
        self,
        name: Name,
        job: Callable[[], R],
        chunk: Chunk,
        layer_spans: Callable[[], NDArray[np.int64]],
    ) -> R:
        """Run a job of all layers; see `run`.

        layer_spans: called after it: when it was in each layer, int64 [layers, 2], monotonic ns.
        """
        return await self._run_work(_Work(name, chunk, None, {}, layer_spans), job)

    async def _run_work(self, work: _Work, job: Callable[[], R]) -> R:
        shown = partial(self._show, work, job) if self._recorder.enabled else job
        if threading.get_ident() == self._thread.ident:
            return shown()
        loop = running_loop()
        if loop is None:
            ended: Completion[R] = Completion()
            self._put(LaneJob(_once(shown), ended.settle, work.chunk))
            return await _yielded(ended)
        done: asyncio.Future[R] = loop.create_future()
        self._put(LaneJob(_once(shown), partial(_post, loop, done), work.chunk))
        return await done

    def start(self, job: Callable[[], None], chunk: Chunk) -> None:
        """Have `job` run on this lane's thread, which is not the caller's. It raises nothing and records itself.

        Raises EngineClosedError after `close`.
        """
        self._put(LaneJob(_once(job), _forget, chunk))

    def begin(
        self,
        name: Name,
        job: Callable[[], R],
        chunk: Chunk,
        layer: LayerIndex | None = None,
        **counts: int,
    ) -> Future[R]:
        """Have `job` run on this lane's thread, and return its result to come. Raises EngineClosedError after `close`."""
        done: Future[R] = Future()
        shown = job
        if self._recorder.enabled:
            shown = partial(self._show, _Work(name, chunk, layer, counts), job)
        self._put(LaneJob(_once(shown), partial(_settle, done), chunk))
        return done

    def drive(self, steps: Generator[Stop, None, R], chunk: Chunk) -> asyncio.Future[R]:
        """Take a chunk through its steps on this lane's thread, where its jobs run at once; return its result to come.

        The lane begins now. Where it pauses, others may have their turn. What it `Waits` for leaves the lane to others. A decode
        step keeps it where it can, since somebody waits for its token: then only those go on that waited for
        other lanes.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()
        self._put(LaneJob(steps, partial(_post, loop, done), chunk))
        return done

    def submit_background(
        self, steps: Generator[None, None, R], *, urgent: bool = False
    ) -> Future[R]:
        """Run work that belongs to no chunk, whenever no chunk's job waits, and return its result to come.

        Where it yields, chunks go first, then urgent work. What is not finished at `close` fails with
        EngineClosedError, which is raised after it.
        """
        done: Future[R] = Future()
        order = (0 if urgent else 1, next(self._numbers))
        self._put(LaneJob(steps, partial(_settle, done), None, order))
        return done

    def leave_out(self, waited_ns: int) -> None:
        """Have the present job's time count for so much less: it waited. Called by the job."""
        self._busy.leave_out(waited_ns)

    def take_times(self) -> list[tuple[ChunkId, float]]:
        """Return what chunks had of the lane since the last call: seconds from one pause to the next."""
        return [self._times.popleft() for _ in range(len(self._times))]

    def busy_ns(self) -> dict[Track, int]:
        """Return how long each track of the lane has worked so far. From any thread; never waits."""
        if self._timeline is None:
            return {Track(self.lane): self._busy.total_ns(time.perf_counter_ns())}
        return {Track(self.lane, number): ns for number, ns in enumerate(self._timeline.busy_ns())}

    def close(self) -> None:
        """Finish the chunks' jobs that were given, then end the thread. Blocks; more calls do nothing."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()
        for job in self._queue.take_background():
            job.settle(None, EngineClosedError(f"lane {self.lane} was closed"))

    def _put(self, job: LaneJob) -> None:
        with self._gate:
            if self._closed:
                raise EngineClosedError(f"lane {self.lane} is closed: open a new engine")
            self._inbox.put(job)

    def _work(self) -> None:
        while True:
            self._accept_all()
            job = self._queue.take(background=not self._closed)
            if job is not None:
                self._run(job)
            elif self._closed and not self._queue.num_waiting and self._inbox.is_empty():
                return
            else:
                self._accept(self._next())

    def _next(self) -> LaneJob | Resumption | None:
        """Return what comes next; meanwhile fetch what a decode step waits for, since nothing else may run."""
        fetched, self._fetched = self._fetched, ()
        for future in fetched:
            future.receive(self._inbox.is_empty)
        given: LaneJob | Resumption | None = self._inbox.take()
        return given

    def _accept_all(self) -> None:
        while not self._inbox.is_empty():
            self._accept(self._inbox.take())

    def _accept(self, given: LaneJob | Resumption | None) -> None:
        if isinstance(given, Resumption):
            self._queue.resume(given)
        elif given is not None:  # None wakes a lane that is closed
            self._queue.put(given)

    def _run(self, job: LaneJob) -> None:
        """Run a job until it ends, waits, or is interrupted."""
        begin_ns = time.perf_counter_ns()
        self._busy.begin(begin_ns)
        stop: Stop = None
        result, error, has_ended = None, None, False
        while True:
            try:
                stop = next(job.steps)
            except StopIteration as done:
                result, has_ended = done.value, True
            except BaseException as caught:  # noqa: BLE001 - handed to the waiter, whatever it is
                error, has_ended = caught, True
            end_ns = time.perf_counter_ns()
            if job.chunk is not None:
                seconds = (end_ns - begin_ns) * 1e-9
                self._times.append((job.chunk.id, seconds))
                self._queue.ran(job, None if has_ended else stop, seconds)
            if has_ended or isinstance(stop, Waits) or self._is_interrupted(job, stop):
                break
            begin_ns = end_ns
        self._busy.end(end_ns)
        if has_ended:
            job.settle(result, error)
        elif isinstance(stop, Waits):
            self._wait(job, stop)
        else:
            self._queue.put(job)

    def _is_interrupted(self, job: LaneJob, pause: Pause | None) -> bool:
        self._accept_all()
        is_over = self._closed and job.chunk is None
        return is_over or self._queue.interrupts(job, pause)

    def _wait(self, job: LaneJob, waits: Waits) -> None:
        resumption = Resumption(job, waits, self._inbox.put)
        self._queue.wait(resumption)
        if resumption.keeps_lane:
            self._fetched = tuple(f for f in waits.futures if isinstance(f, ReceivableFuture))
        for future in waits.futures:
            future.add_done_callback(resumption)

    def _show(self, work: _Work, job: Callable[[], R]) -> R:
        recorder = self._recorder
        if self._timeline is not None:
            self._timeline.begin()
        start_ns = recorder.now_ns()
        try:
            return job()
        finally:
            self._record(work, start_ns)

    def _record(self, work: _Work, start_ns: int) -> None:
        recorder, args = self._recorder, work.args()
        phase = _FLOW_PHASES.get(work.name, "step")
        if self._timeline is None:
            recorder.span(self.lane, work.name, start_ns, recorder.now_ns(), args)
            recorder.flow(work.chunk.id, self.lane, start_ns, phase)
            return
        parts, notes = _PARTS.get(work.name) or (work.name,), self._timeline.take()
        if work.layer_spans is None:
            recorder.pool_job(self.lane, parts, notes, args, work.chunk.id, phase)
            return
        for layer, (begin_ns, end_ns) in enumerate(work.layer_spans().tolist()):
            mine = [each[(each[:, 0] >= begin_ns) & (each[:, 0] < end_ns)] for each in notes]
            if any(map(len, mine)):
                own = args | {"layer": layer}
                recorder.pool_job(self.lane, parts, mine, own, work.chunk.id, phase)


class TimedLane:
    """A lane that reports each job: its name, whether it was a prompt's, of how many tokens, and its seconds."""

    def __init__(self, lane: JobLane, on_timed: Callable[[Name, bool, int, float], None]) -> None:
        """on_timed: called on the lane's thread, after the job."""
        self._lane = lane
        self._on_timed = on_timed

    async def run(
        self,
        name: Name,
        job: Callable[[], R],
        chunk: Chunk,
        layer: LayerIndex | None = None,
        **counts: int,
    ) -> R:

        def timed() -> R:
            start_s = time.perf_counter()
            result = job()
            seconds = time.perf_counter() - start_s
            self._on_timed(name, chunk.is_prompt, chunk.num_tokens, seconds)
            return result

        return await self._lane.run(name, timed, chunk, layer, **counts)


# What the core's marks mean in a job that has several parts.
_PARTS: Mapping[Name, tuple[Name, ...]] = MappingProxyType(
    {
        Name.LAYER: (Name.ATTEND, Name.ROUTER, Name.COLD),
        # A drafter may compute a layer of its own, in jobs of its own and behind the head of a prompt's chunk.
        Name.HEAD: (Name.HEAD, Name.DRAFT, Name.DRAFT),
        Name.DRAFT: (Name.DRAFT, Name.DRAFT, Name.DRAFT),
    }
)

# Where the arrow that follows a chunk begins and ends; every other span on its way is a step.
_FLOW_PHASES: Mapping[Name, FlowPhase] = MappingProxyType({Name.EMBED: "start", Name.HEAD: "end"})


async def result_of(future: Future[R]) -> R:
    """Return the future's result: awaited on an event loop, else yielded to whoever drives the coroutine."""
    if running_loop() is None:
        return await _yielded(future)
    # Nobody stops the work by not waiting for it any more.
    return await asyncio.shield(asyncio.wrap_future(future))


@coroutine
def _yielded(future: Future[R] | Completion[R]) -> Generator[AnyFuture, None, R]:
    """Hand a future to whoever drives the coroutine, and its result to the coroutine."""
    yield future
    return future.result()


def _once(job: Callable[[], R]) -> Generator[Stop, None, R]:
    yield from ()  # a job without a pause
    return job()


def _forget(result: object, error: BaseException | None) -> None:
    """Log the error of a job that nobody waits for."""
    if error is not None:
        _LOG.error("a job that nobody waits for failed", exc_info=error)


def _settle(
    done: asyncio.Future[Any] | Future[Any],
    result: Any,  # noqa: ANN401 - whatever the job returned
    error: BaseException | None,
) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _post(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    result: Any,  # noqa: ANN401 - whatever the job returned
    error: BaseException | None,
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, done, result, error)
    except RuntimeError:
        return  # the waiter's loop is closed: nobody is left to tell
