"""The server's counters, and the whole text of /metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web

from thermocline.errors import EngineClosedError
from thermocline.server.core.connection import ConnectionCounts
from thermocline.server.metrics.exposition import gauge, write
from thermocline.server.metrics.figures import (
    connection_families,
    draft_families,
    expert_families,
    process_families,
    scheduler_families,
)
from thermocline.server.metrics.loop_lag import LoopLag
from thermocline.server.metrics.meter import AnswerMeter

if TYPE_CHECKING:
    from thermocline.engine.api import Engine
    from thermocline.server.metrics.exposition import Family

_PREFIX: Final = "thermocline:"


class Telemetry:
    """The counters of one server."""

    def __init__(self) -> None:
        self.meter = AnswerMeter()
        self.connections = ConnectionCounts()
        self.lag = LoopLag()

    async def exposition(self, engine: Engine | None) -> str:
        """Return all figures in Prometheus' format; those of the engine only if there is one."""
        families = [
            *self.meter.families(),
            *connection_families(self.connections),
            self.lag.lag.family(
                "event_loop_lag_seconds", "How late the server's event loop comes to what is due."
            ),
            self.lag.stall.family(
                "event_loop_stall_seconds", "The same without its waiting for a processor."
            ),
            self.lag.busy.family(
                "event_loop_busy_seconds", "The same, as far as its own thread computed."
            ),
            gauge("tasks", "Tasks on the server's event loop.", len(asyncio.all_tasks())),
            *process_families(),
            *(await _engine_families(engine)),
        ]
        return write(families, _PREFIX)


TELEMETRY: Final = web.AppKey("TELEMETRY", Telemetry)


async def _engine_families(engine: Engine | None) -> list[Family]:
    if engine is None:
        return [gauge("is_ready", "Whether the model can answer.", 0)]
    try:
        snapshot = await engine.snapshot()
    except EngineClosedError:
        return [gauge("is_ready", "Whether the model can answer.", 0)]
    statistics = engine.statistics()
    return [
        gauge("is_ready", "Whether the model can answer.", 1),
        *scheduler_families(snapshot),
        *draft_families(statistics),
        *expert_families(statistics),
    ]
