"""Routes that belong to no interface: whether the server is well."""

from __future__ import annotations

from aiohttp import web

from thermocline.errors import EngineClosedError
from thermocline.server.exchange import BACKEND, send_json


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [web.get("/health", health), web.get("/v1/health", health)]


async def health(request: web.Request) -> web.Response:
    """Say whether the model can answer."""
    if not request.app[BACKEND].model.engine.is_running:
        raise EngineClosedError("the engine has stopped: restart the server")
    return send_json({"status": "ok"})
