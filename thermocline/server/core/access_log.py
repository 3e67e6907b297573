"""A line for every request, when it has ended: to the logger `thermocline.access`, which is off unless it is asked for.

Neither bodies nor queries nor keys are logged. Knows no route.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from thermocline.server.core.connection import connection_of
from thermocline.server.core.gate import REQUEST_ID

if TYPE_CHECKING:
    from thermocline.server.core.request_clock import RequestClock

ACCESS: Final = logging.getLogger("thermocline.access")
# As nginx says it; no such answer is sent.
_CLIENT_LEFT: Final = 499


@web.middleware
async def log_access(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    """Log a request after its answer, a stream's last event included; inside of `follow`, which starts its clock."""
    if not ACCESS.isEnabledFor(logging.INFO):
        response: web.StreamResponse = await handler(request)
        return response
    clock = connection_of(request).clock
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        _log(request, _CLIENT_LEFT, clock)
        raise
    _log(request, response.status, clock)
    return response


def _log(request: web.Request, status: int, clock: RequestClock) -> None:
    fields = {
        "client": request.remote or "-",
        "method": request.method,
        "path": request.path,
        "status": status,
        "seconds": round(clock.elapsed_s(), 4),
        "request_id": request[REQUEST_ID],
    }
    line = "%(client)s %(method)s %(path)s %(status)s in %(seconds)s s %(request_id)s"
    ACCESS.info(line, fields, extra={"fields": fields})
