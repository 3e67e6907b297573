"""Records a server's timeline, one window at a time, and keeps the last one. Knows no HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thermocline.server.core.errors import NoTraceError, TraceStateError
from thermocline.traces.chrome import encode_chrome
from thermocline.traces.timeline_page import pack_timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.server.core.lease import ModelLease
    from thermocline.traces.events import Trace


@dataclass(frozen=True, slots=True, eq=False)
class RecordedWindow:
    """The timeline between a start and a stop."""

    id: str
    trace: Trace
    num_dropped: int
    """Older events for which there was no room."""
    seconds: float
    _packed: dict[Callable[[Trace], bytes], asyncio.Task[bytes]] = field(default_factory=dict)

    def as_body(self) -> dict[str, Any]:
        """Return its figures."""
        return {
            "window": self.id,
            "seconds": round(self.seconds, 6),
            "events": len(self.trace.events),
            "dropped": self.num_dropped,
        }

    async def packed_chrome(self) -> bytes:
        """Return the window as gzipped Chrome JSON."""
        return await self._once(_as_chrome)

    async def packed_timeline(self) -> bytes:
        """Return the data of the timeline page."""
        return await self._once(pack_timeline)

    async def _once(self, pack: Callable[[Trace], bytes]) -> bytes:
        """Return what `pack` makes of the trace, off the event loop and once for all readers.

        It takes some microseconds per event, and each of them keeps other threads from Python.
        """
        if pack not in self._packed:
            self._packed[pack] = asyncio.create_task(asyncio.to_thread(pack, self.trace))
        # A reader that leaves does not take the others' bytes along.
        return await asyncio.shield(self._packed[pack])


def _as_chrome(trace: Trace) -> bytes:
    return encode_chrome(trace.events, metadata=trace.metadata, expert_use=trace.expert_use)


class Recording:
    """Starts and stops the recording of an engine, one at a time, and keeps the last window.

    A model whose timeline is recorded is not unloaded.
    """

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._lease: ModelLease | None = None
        self._collecting: asyncio.Task[RecordedWindow] | None = None
        self._num_windows = 0
        self._last: RecordedWindow | None = None

    def __repr__(self) -> str:
        state = "idle" if self._started_s is None else "recording"
        return f"Recording({state}, {self._num_windows} windows)"

    @property
    def last(self) -> RecordedWindow:
        """The last window. Raises NoTraceError before the first has ended."""
        if self._last is None:
            raise NoTraceError(
                "no timeline has been recorded: POST /trace/start, send requests, POST /trace/stop"
            )
        return self._last

    def start(self, lease: ModelLease) -> str:
        """Record a model from now on, and return the window's name; `stop` releases the lease.

        Raises TraceStateError while one is recorded.
        """
        engine = lease.model.engine
        is_collecting = self._collecting is not None and not self._collecting.done()
        is_held = self._lease is not None and self._lease.model.engine.is_running
        if engine.is_tracing or is_collecting or is_held:
            lease.release()
            raise TraceStateError("a timeline is being recorded already: POST /trace/stop ends it")
        if self._lease is not None:
            self._lease.release()  # of an engine that has ended meanwhile
        engine.start_trace()
        self._started_s, self._lease = time.monotonic(), lease
        self._num_windows += 1
        return f"trace-{self._num_windows}"

    async def stop(self) -> RecordedWindow:
        """End the window and return it. Raises TraceStateError if none is being recorded."""
        if self._started_s is None or self._lease is None:
            raise TraceStateError("no timeline is being recorded: POST /trace/start begins one")
        seconds, self._started_s = time.monotonic() - self._started_s, None
        # A task: if this request is cancelled, the events are still collected and the next window can start.
        lease, self._lease = self._lease, None
        self._collecting = asyncio.create_task(self._collect(lease, seconds), name="trace window")
        return await asyncio.shield(self._collecting)

    async def _collect(self, lease: ModelLease, seconds: float) -> RecordedWindow:
        try:
            trace, num_dropped = await asyncio.to_thread(lease.model.engine.stop_trace)
        finally:
            lease.release()
        self._last = RecordedWindow(f"trace-{self._num_windows}", trace, num_dropped, seconds)
        return self._last
