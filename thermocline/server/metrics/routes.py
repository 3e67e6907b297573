"""Routes of no interface: health and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from thermocline.errors import DeviceFaultError, EngineClosedError, ModelChangedError
from thermocline.server.core.errors import DrainingError
from thermocline.server.core.exchange import POOL, send_json
from thermocline.server.core.gate import GATE, IN_FLIGHT
from thermocline.server.metrics.exposition import CONTENT_TYPE
from thermocline.server.metrics.telemetry import TELEMETRY

if TYPE_CHECKING:
    from thermocline.engine.api import Engine


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        web.get("/health", health),
        web.get("/v1/health", health),
        web.get("/metrics", metrics),
    ]


async def health(request: web.Request) -> web.Response:
    """Say whether the server can answer, or the model ?model=NAME, and which models are loaded."""
    if request.app[IN_FLIGHT].is_draining:
        raise DrainingError("the server is shutting down: use another")
    pool, name = request.app[POOL], request.query.get("model")
    states = pool.states()
    for state in states:
        if state.model.is_pinned or state.model.card.id == name:
            _require_running(pool.opened(state.model.card.id).engine)
    if name is not None:
        pool.opened(name)
    body: dict[str, object] = {"status": "ok"}
    # This route wants no key, but names are only for those who have one.
    if request.app[GATE].knows(request) and not all(state.model.is_pinned for state in states):
        body["models"] = {state.model.card.id: state.state for state in states}
    return send_json(body)


def _require_running(engine: Engine) -> None:
    if not engine.is_running:
        why = engine.why_ended()
        if isinstance(why, DeviceFaultError | ModelChangedError):
            raise why
        raise EngineClosedError("the engine has stopped: restart the server")


async def metrics(request: web.Request) -> web.Response:
    """Return all counters in Prometheus' format; of a model that is not open, without its engine's."""
    text = await request.app[TELEMETRY].exposition(request.app[POOL])
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
