"""The dashboard's routes: experts, placement, the timeline, the live feed, the page."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from aiohttp import web

from thermocline.errors import RequestError
from thermocline.server.core.errors import error_body
from thermocline.server.core.exchange import CONFIG, POOL, operation, send_json, shown_model
from thermocline.server.core.sse import EventStream, Framing, frame
from thermocline.server.dashboard.experts import experts_body, placement_body
from thermocline.server.dashboard.pages import FILES_PATH, PAGE_FILES, PAGES
from thermocline.server.dashboard.state import Dashboard
from thermocline.traces.timeline_page import page_around, page_policy

if TYPE_CHECKING:
    from thermocline.engine.api import Engine

DASHBOARD: Final = web.AppKey("VIEWS", Dashboard)

_Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

_FRAMING: Final = Framing(error=lambda error: frame(error_body(error)))


def install(app: web.Application) -> None:
    """Add the dashboard to an application that has its pool."""
    app[DASHBOARD] = Dashboard.of(app[POOL])
    app.add_routes(routes())
    app.on_shutdown.append(_close_feed)


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        web.get("/experts", experts),
        web.get("/placement", placement),
        web.post("/trace/start", start_trace),
        web.post("/trace/stop", stop_trace),
        web.get("/trace/last", last_trace),
        web.get("/trace/last.json.gz", packed_trace),
        # Without HEAD: its response would never end.
        web.get("/events", events, allow_head=False),
        *(web.get(path, page) for path in PAGES),
        *(web.get(FILES_PATH + name, page_file) for name in PAGE_FILES),
    ]


@operation(query={"layer": _Layer, "format": Literal["full", "summary"]})
async def experts(request: web.Request) -> web.Response:
    """Say how often each expert was chosen, and where it is: ?layer=N, ?format=summary."""
    engine = _engine(request)
    wanted = _choice(request, "full", "summary")
    num_layers = engine.spec.num_layers
    layers: range | tuple[int] = range(num_layers)
    if "layer" in request.query:
        layers = (_number(request.query["layer"], "layer", num_layers),)
    num_used = engine.spec.router.num_experts_used
    body = experts_body(engine.statistics(), num_used, layers, summary=wanted == "summary")
    return send_json(body)


async def placement(request: web.Request) -> web.Response:
    """Say which part of the model each device and backend holds, and why."""
    engine = _engine(request)
    process_bytes = request.app[DASHBOARD].live.memory().process_bytes
    statistics = engine.statistics()
    body = placement_body(
        statistics, engine.footprint, engine.placement_config, process_bytes, engine.choices()
    )
    return send_json(body)


async def start_trace(request: web.Request) -> web.Response:
    """Begin to record the timeline."""
    lease = await request.app[POOL].lease(shown_model(request).card.id)
    window = request.app[DASHBOARD].recording.start(lease)
    return send_json({"window": window, "recording": True})


async def stop_trace(request: web.Request) -> web.Response:
    """End the recording, and keep what was recorded as the last window."""
    window = await request.app[DASHBOARD].recording.stop()
    return send_json(window.as_body() | {"recording": False})


@operation(query={"format": Literal["json", "html", "timeline"]})
async def last_trace(request: web.Request) -> web.Response:
    """Return the last window: Chrome JSON, ?format=html for a page, ?format=timeline for its data."""
    window = request.app[DASHBOARD].recording.last
    wanted = _choice(request, "json", "html", "timeline")
    if wanted == "json":
        packed = await window.packed_chrome()
        return await _unpacked_if_needed(request, packed)
    packed = await window.packed_timeline()
    if wanted == "timeline":
        return await _unpacked_if_needed(request, packed)
    headers = {"Content-Security-Policy": page_policy()}
    return web.Response(text=page_around(packed), content_type="text/html", headers=headers)


async def packed_trace(request: web.Request) -> web.Response:
    """Return the last window as a gzipped file of Chrome JSON."""
    packed = await request.app[DASHBOARD].recording.last.packed_chrome()
    return web.Response(body=packed, content_type="application/gzip")


async def events(request: web.Request) -> web.StreamResponse:
    """Stream what the server does, a few times a second, until the client or the server leaves."""
    stream = EventStream(request, request.app[CONFIG], _FRAMING)
    async with aclosing(request.app[DASHBOARD].feed.frames()) as frames, stream:
        async for event in frames:
            await stream.send(event)
    return stream.response


async def page(request: web.Request) -> web.Response:
    """Return a page for browsers: the dashboard, or the description of this interface."""
    return request.app[DASHBOARD].files[PAGES[request.path]].answer(request)


async def page_file(request: web.Request) -> web.Response:
    """Return a file that the page is made of."""
    return request.app[DASHBOARD].files[request.path.removeprefix(FILES_PATH)].answer(request)


async def _close_feed(app: web.Application) -> None:
    await app[DASHBOARD].feed.close()


async def _unpacked_if_needed(request: web.Request, packed: bytes) -> web.Response:
    """Return gzipped JSON, unpacked for a client that does not accept gzip."""
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return web.Response(body=packed, content_type="application/json", headers=headers)
    body = await asyncio.to_thread(gzip.decompress, packed)
    return web.Response(
        body=body, content_type="application/json", headers={"Vary": "Accept-Encoding"}
    )


def _engine(request: web.Request) -> Engine:
    return shown_model(request).engine


def _choice(request: web.Request, *choices: str) -> str:
    """Return ?format=, the first of `choices` without it. Raises RequestError for others."""
    wanted = request.query.get("format", choices[0])
    if wanted not in choices:
        raise RequestError(
            f"format is {wanted!r}: choose one of {', '.join(choices)}", param="format"
        )
    return wanted


def _number(text: str, name: str, end: int) -> int:
    """Return a whole number from 0 to end - 1. Raises RequestError."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < end):
        raise RequestError(f"{name} is {text!r}: give 0 to {end - 1}", param=name)
    return int(text)
