"""The thread and event loop on which an engine lives: its start, its end, and calls into it.

Nothing here waits on the caller's thread pool, and a caller that is cancelled while it opens or closes
leaves no thread behind. Knows no prompt and no event.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from thermocline.engine.assembly import load_parts
from thermocline.errors import (
    DeviceFaultError,
    EngineClosedError,
    EngineError,
    ModelChangedError,
)
from thermocline.pipeline.step_loop import copied_fault

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from thermocline.config import EngineConfig
    from thermocline.engine.assembly import EngineParts, LoadStep
    from thermocline.pipeline.replica_loops import AnyStepLoop

R = TypeVar("R")
_Opened = tuple["EngineParts", asyncio.AbstractEventLoop]


class EngineThread:
    """Runs one engine's parts. `start`, `wait_ready`, then `call`; `request_close`, then `wait_ended`."""

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig) -> None:
        self._path = path
        self._config = config
        self._ready: Future[_Opened] = Future()
        self._ended: Future[None] = Future()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self.load_step: LoadStep | None = None
        """What opening does at present, or did last."""
        self._fault: DeviceFaultError | ModelChangedError | None = None
        self._thread = threading.Thread(target=self._run, name="thermocline engine", daemon=True)

    def __repr__(self) -> str:
        state = "running" if self.is_running else "opening" if not self._ready.done() else "ended"
        return f"EngineThread({state})"

    @property
    def parts(self) -> EngineParts:
        """What runs there. Raises EngineClosedError before it is open, and what opening raised."""
        return self._opened()[0]

    @property
    def is_running(self) -> bool:
        """Whether calls can be served."""
        return self._ready.done() and not self._ended.done()

    def start(self) -> None:
        """Begin to open. Raises EngineError when the system gives no thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            failure = EngineError(f"no thread can be started ({error}): end other programs")
            failure.__cause__ = error
            self._ready.set_exception(failure)
            self._ended.set_result(None)
            raise failure from error

    async def wait_ready(self) -> None:
        """Wait until the engine is open. Raises what opening raised."""
        await asyncio.shield(asyncio.wrap_future(self._ready))

    def request_close(self) -> None:
        """Have the engine end, at once or as soon as it is open. Never waits."""
        self._ready.add_done_callback(_post_close)

    async def wait_over(self) -> None:
        """Wait until the engine has ended, whatever the reason."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def wait_ended(self) -> None:
        """Wait until the thread has closed everything; being cancelled does not stop the closing."""
        await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join()  # only its last few instructions are left

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

    async def call(self, action: Callable[[AnyStepLoop], R]) -> R:
        """Run `action` on the engine's thread and return its result. Raises `why_ended` after the end."""
        done: Future[R] = Future()

        def run(loop: AnyStepLoop) -> None:
            # A caller that was cancelled meanwhile wants no action; one cancelled later gets its result
            # nowhere, and undoes what it must by itself.
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(action(loop))
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                done.set_exception(error)

        with self._lock:
            posted = not self._ended.done() and self.post(run)
            if posted:
                self._pending.add(done)
        if not posted:
            raise self.why_ended()
        done.add_done_callback(self._pending.discard)
        return await asyncio.wrap_future(done)

    def post(self, action: Callable[[AnyStepLoop], object]) -> bool:
        """Run `action` on the engine's thread some time soon; False when it has ended."""
        parts, loop = self._opened()
        try:
            loop.call_soon_threadsafe(action, parts.step_loop)
        except RuntimeError:
            return False
        return True

    def why_ended(self) -> EngineError:
        """Return an error for who calls an engine that has ended: closed, or the fault that ended it."""
        if self._fault is not None:
            return copied_fault(self._fault)
        return EngineClosedError("the engine is closed: open a new one")

    def _opened(self) -> _Opened:
        if not self._ready.done():
            raise EngineClosedError("the engine is not open: use `async with Engine.open(path)`")
        return self._ready.result()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=fastest_loop()) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - the thread ends here; the opener or readers know
            if not self._ready.done():
                self._ready.set_exception(error)
            elif isinstance(error, DeviceFaultError | ModelChangedError):
                self._fault = error
        with self._lock:
            self._ended.set_result(None)
            unserved = tuple(self._pending)
        for call in unserved:
            # Posted in the moment between the loop's last round and its end.
            if not call.done() and call.set_running_or_notify_cancel():
                call.set_exception(self.why_ended())

    def _note_step(self, step: LoadStep) -> None:
        self.load_step = step

    async def _main(self) -> None:
        parts = load_parts(self._path, self._config, self._note_step)
        try:
            self._ready.set_result((parts, asyncio.get_running_loop()))
            await parts.step_loop.run()
        finally:
            parts.close()


def _post_close(ready: Future[_Opened]) -> None:
    if ready.exception() is not None:
        return
    parts, loop = ready.result()
    try:
        loop.call_soon_threadsafe(parts.step_loop.close)
    except RuntimeError:
        return  # the loop has ended by itself


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of uvloop's event loop, None where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
