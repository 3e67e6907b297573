"""Routes of no interface: health and metrics."""

from __future__ import annotations

from aiohttp import web

from thermocline.errors import DeviceFaultError, EngineClosedError, ModelChangedError
from thermocline.server.core.errors import DrainingError
from thermocline.server.core.exchange import BACKEND, send_json
from thermocline.server.core.gate import IN_FLIGHT
from thermocline.server.metrics.exposition import CONTENT_TYPE
from thermocline.server.metrics.telemetry import TELEMETRY


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        web.get("/health", health),
        web.get("/v1/health", health),
        web.get("/metrics", metrics),
    ]


async def health(request: web.Request) -> web.Response:
    """Say whether the model can answer."""
    if request.app[IN_FLIGHT].is_draining:
        raise DrainingError("the server is shutting down: use another")
    engine = request.app[BACKEND].model.engine
    if not engine.is_running:
        why = engine.why_ended()
        if isinstance(why, DeviceFaultError | ModelChangedError):
            raise why
        raise EngineClosedError("the engine has stopped: restart the server")
    return send_json({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    """Return all counters in Prometheus' format; before the model is open, without the engine's."""
    backend = request.app[BACKEND]
    engine = backend.model.engine if backend.is_open else None
    text = await request.app[TELEMETRY].exposition(engine)
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})
