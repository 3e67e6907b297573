"""An event loop on a thread of its own, for callers that have none, or are inside one that must not be nested."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from thermocline.engine.thread import fastest_loop
from thermocline.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Coroutine

R = TypeVar("R")


class LoopJob(Generic[R]):
    """A coroutine that runs on a `LoopThread`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, R]) -> None:
        self._loop = loop
        self._ended: Future[R] = Future()
        self._task: asyncio.Task[R] | None = None
        loop.call_soon_threadsafe(self._start, work)

    @property
    def has_ended(self) -> bool:
        """Whether `result` returns at once."""
        return self._ended.done()

    def result(self) -> R:
        """Block until the coroutine has ended; return or raise what it did."""
        return self._ended.result()

    def cancel(self) -> None:
        """Have the coroutine end soon. Never waits; more calls, and calls after the end, do nothing."""
        if not self.has_ended:  # and so the loop runs
            self._loop.call_soon_threadsafe(self._cancel)

    def wait_ended(self) -> None:
        """Block until the coroutine has ended, however it did."""
        wait([self._ended])

    def _start(self, work: Coroutine[Any, Any, R]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            self._ended.cancel()
            self._ended.set_running_or_notify_cancel()
            return
        error = task.exception()
        if error is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(task.result())


class LoopThread:
    """Runs coroutines for any thread until it is closed."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"LoopThread({self._thread.name!r}, {'closed' if self._is_closed else 'open'})"

    def submit(self, work: Coroutine[Any, Any, R]) -> LoopJob[R]:
        """Start a coroutine there. Raises EngineClosedError after `close`."""
        with self._lock:
            if not self._is_closed:
                return LoopJob(self._ready.result()[0], work)
        work.close()
        raise EngineClosedError("the model is closed: open it again")

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine there to its end. What interrupts the wait, as Ctrl-C does, cancels it and waits for that."""
        job = self.submit(work)
        try:
            return job.result()
        except BaseException:
            job.cancel()
            job.wait_ended()
            raise

    def close(self) -> None:
        """Wait until all coroutines have ended, then end the thread. Not for that thread itself."""
        loop, stop = self._ready.result()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                # Behind the start of every coroutine that was submitted.
                loop.call_soon_threadsafe(stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        stop = asyncio.Event()
        self._ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        if running:
            await asyncio.wait(running)
