"""One thread per CPU resource: jobs run on it one at a time, and each is a span on its lane.

A coroutine awaits a job while the event loop stays free; completion reaches the loop without polling.
Knows nothing of what the jobs compute.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from thermocline.errors import EngineClosedError
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from types import TracebackType

    from thermocline.traces.events import FlowPhase
    from thermocline.traces.recorder import Recorder

R = TypeVar("R")
SpanArgs = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], Any]
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    span: Name
    args: SpanArgs | None


class LaneThread:
    """A thread that is one lane of the trace. Close it (or leave its context) to end the thread."""

    def __init__(self, lane: Lane, recorder: Recorder) -> None:
        self.lane = lane
        self._recorder = recorder
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"lane {lane}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._jobs.qsize()} waiting"
        return f"LaneThread({self.lane}, {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    async def run(self, span: Name, job: Callable[[], R], args: SpanArgs | None = None) -> R:
        """Run `job` on this lane's thread and return its result.

        Without a running event loop the job runs at once on the calling thread, which then has the
        lane to itself (see pipeline.walk). A job whose waiter is cancelled still runs to its end: what it writes to stays valid until
        the lane is closed. Raises what the job raises, EngineClosedError after `close`.
        """
        if self._closed:
            raise EngineClosedError(f"lane {self.lane} is closed: open a new engine")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._run_here(span, job, args)
        done: asyncio.Future[R] = loop.create_future()
        self._jobs.put(_Job(job, done, loop, span, args))
        return await done

    def close(self) -> None:
        """Finish the jobs that were given, then end the thread. Blocks; more calls do nothing."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run_here(self, span: Name, job: Callable[[], R], args: SpanArgs | None) -> R:
        start_ns = self._recorder.now_ns()
        try:
            return job()
        finally:
            self._record(span, args, start_ns)

    def _record(self, span: Name, args: SpanArgs | None, start_ns: int) -> None:
        if not self._recorder.enabled:
            return
        self._recorder.span(self.lane, span, start_ns, self._recorder.now_ns(), args)
        chunk = args.get("chunk") if args else None
        if isinstance(chunk, int):
            phase = _FLOW_PHASES.get(span, "step")
            self._recorder.flow(chunk, self.lane, start_ns, phase)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            start_ns = self._recorder.now_ns()
            try:
                result, error = job.run(), None
            except BaseException as caught:  # noqa: BLE001 - handed to the waiter, whatever it is
                result, error = None, caught
            self._record(job.span, job.args, start_ns)
            try:
                job.loop.call_soon_threadsafe(_settle, job.done, result, error)
            except RuntimeError:
                # The waiter's loop is closed: nobody is left to tell.
                continue


# Where the arrow that follows a chunk begins and ends; every other span on its way is a step.
_FLOW_PHASES: Mapping[Name, FlowPhase] = MappingProxyType({Name.EMBED: "start", Name.HEAD: "end"})


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:  # noqa: ANN401
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
