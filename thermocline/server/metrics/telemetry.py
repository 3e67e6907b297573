"""The server's counters, and the whole text of /metrics."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from aiohttp import web

from thermocline.errors import EngineClosedError
from thermocline.server.core.connection import ConnectionCounts
from thermocline.server.core.exchange import MODEL, POOL
from thermocline.server.metrics.exposition import (
    Family,
    Sample,
    gauge,
    joined,
    labelled,
    with_label,
    write,
)
from thermocline.server.metrics.figures import (
    connection_families,
    draft_families,
    expert_families,
    process_families,
    scheduler_families,
    spill_families,
)
from thermocline.server.metrics.loop_lag import LoopLag
from thermocline.server.metrics.meter import AnswerMeter

if TYPE_CHECKING:
    from thermocline.engine.api import Engine
    from thermocline.server.core.pool import ModelPool

_PREFIX: Final = "thermocline:"
_NO_NAME: Final = ""
_LABEL: Final = "model"


class Telemetry:
    """The counters of one server."""

    def __init__(self) -> None:
        self.meters: defaultdict[str, AnswerMeter] = defaultdict(AnswerMeter)
        """By model; "" is for a model that is there from the start, and for requests that got none."""
        self.connections = ConnectionCounts()
        self.lag = LoopLag()

    async def exposition(self, pool: ModelPool) -> str:
        """Return all figures in Prometheus' format; those of engines only where they run.

        A server with one model that is there from the start has no label of models.
        """
        self.meters[_NO_NAME]  # shown from the start
        families = [
            family
            for name, meter in self.meters.items()
            for family in _named(name, meter.families())
        ]
        families += [
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
            *_pool_families(pool),
        ]
        for state in pool.states():
            name = _NO_NAME if state.model.is_pinned else state.model.card.id
            engine = None if state.opened is None else state.opened.engine
            families += _named(name, await _engine_families(engine))
        return write(joined(families), _PREFIX)


TELEMETRY: Final = web.AppKey("TELEMETRY", Telemetry)


def meter_of(request: web.Request) -> AnswerMeter:
    """Return the counters of the model that a request uses."""
    model = request.get(MODEL)
    is_named = model is not None and not request.app[POOL].is_pinned(model.card.id)
    meters = request.app[TELEMETRY].meters
    return meters[model.card.id if model is not None and is_named else _NO_NAME]


def _named(name: str, families: list[Family]) -> list[Family]:
    return [with_label(each, _LABEL, name) for each in families] if name else families


def _pool_families(pool: ModelPool) -> list[Family]:
    """Return what models take of the memory, and how often they came and went; nothing where all are there for ever."""
    states = [state for state in pool.states() if not state.model.is_pinned]
    if not states:
        return []
    used = sum(state.host_bytes for state in states if state.state != "unloaded")
    unloads = tuple(
        Sample(count, ((_LABEL, name), ("reason", reason)))
        for (name, reason), count in pool.total_unloads.items()
    )
    return [
        labelled(
            "models_memory_bytes",
            "gauge",
            "Memory of the loaded models by plan, and what they may take together.",
            "state",
            {"used": used, "budget": pool.budget_bytes},
        ),
        labelled(
            "model_loads_total", "counter", "Times a model was loaded.", _LABEL, pool.total_loads
        ),
        Family("model_unloads_total", "counter", "Times a model was unloaded.", unloads),
    ]


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
        *spill_families(statistics),
        *expert_families(statistics),
    ]
