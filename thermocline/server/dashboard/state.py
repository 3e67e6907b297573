"""The parts of a server's dashboard, and how the live feed reads the engine. Knows no route."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from thermocline.engine.assembly import LoadStep
from thermocline.errors import EngineClosedError, ThermoclineError
from thermocline.server.core.errors import LoadingError, NoModelLoadedError
from thermocline.server.core.sse import frame
from thermocline.server.dashboard.broadcast import Broadcast
from thermocline.server.dashboard.live import EngineReading, Memory, Window
from thermocline.server.dashboard.pages import PageFile, load_page_files
from thermocline.server.dashboard.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thermocline.engine.api import Engine
    from thermocline.server.core.backend import Backend
    from thermocline.server.core.pool import ModelPool

EVENT_INTERVAL_S: Final = 1 / 3


class LiveView:
    """Makes the events of the live feed, while the model is loading too."""

    def __init__(self, shown: Callable[[], Backend]) -> None:
        """shown: returns what holds the model that events are about, and raises NoModelLoadedError for none."""
        self._shown = shown
        self._process = psutil.Process()
        self._window = Window()
        self._engine: Engine | None = None
        self._number = 0

    async def make(self) -> bytes:
        """Return the next event as a frame."""
        self._number += 1
        body: dict[str, Any] = {"seq": self._number, "model": "", "memory": asdict(self.memory())}
        try:
            backend = self._shown()
        except NoModelLoadedError as error:
            self._engine, self._window = None, Window()
            return frame(body | {"state": "idle", "error": str(error)})
        body["model"] = backend.card.id
        try:
            body |= {"state": "ready"} | await self._read(backend.model.engine)
        except LoadingError:
            body |= {"state": "loading", "load": _load_body(backend)}
        except EngineClosedError as error:
            body |= {"state": "stopped", "error": str(error)}
        except ThermoclineError as error:
            body |= {"state": "failed", "error": str(error)}
        return frame(body)

    def memory(self) -> Memory:
        """Return the memory in use and available."""
        machine = psutil.virtual_memory()
        return Memory(self._process.memory_info().rss, machine.available, machine.total)

    async def _read(self, engine: Engine) -> dict[str, Any]:
        if engine is not self._engine:  # opened again: its counters begin anew
            self._engine, self._window = engine, Window()
        scheduler = await engine.snapshot()
        at_s, busy_ns = time.monotonic(), engine.busy_ns()
        self._window.add(
            EngineReading(at_s, scheduler, engine.statistics(), busy_ns, engine.is_tracing)
        )
        return self._window.body()


def _load_body(backend: Backend) -> dict[str, Any]:
    step, steps = backend.load_step, list(LoadStep)
    return {
        "step": step,
        "done": 0 if step is None else steps.index(step),
        "total": len(steps),
        "seconds": round(backend.seconds_opening, 3),
    }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """What the dashboard's routes use."""

    live: LiveView
    feed: Broadcast
    recording: Recording
    files: Mapping[str, PageFile]

    @classmethod
    def of(cls, pool: ModelPool) -> Self:
        """Return the dashboard of a server's models."""
        live = LiveView(lambda: pool.shown)
        return cls(live, Broadcast(live.make, EVENT_INTERVAL_S), Recording(), load_page_files())
