"""Ollama's /api/pull and /api/delete: models of the hub, downloaded into its cache and removed from it.

Only a server that was started with --allow-model-changes does either. Files of folders and lists are never removed. Knows
no engine.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from thermocline.errors import BusyError, HubError, RequestError
from thermocline.hub.cache import cached_models, remove
from thermocline.hub.client import DOWNLOADING, download, hub_files
from thermocline.hub.names import parse_name
from thermocline.hub.variants import choose, group_variants
from thermocline.server.core.errors import ModelNotFoundError, NotAllowedError
from thermocline.server.core.exchange import CONFIG, POOL, operation, read_json, send_json
from thermocline.server.core.sse import EventStream
from thermocline.server.ollama.encoder import line
from thermocline.server.ollama.errors import LINES
from thermocline.server.ollama.schema import plain_name

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from thermocline.hub.names import HubName
    from thermocline.hub.variants import Variant
    from thermocline.server.core.bodies import JsonObject

# Bytes arrive in many small pieces.
_REPORT_S: Final = 0.1
_SUCCESS: Final = "success"


class _NobodyWaitsError(Exception):
    """Ends a download whose client has left."""


class PullRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/pull; `name` is what older clients send."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

    @property
    def hub_name(self) -> HubName:
        """The model asked for. Raises RequestError and HubError."""
        return _hub_name(self.model or self.name)


class DeleteRequest(msgspec.Struct, kw_only=True):
    """The body of DELETE /api/delete."""

    model: str | None = None
    name: str | None = None


@dataclass(slots=True)
class _Transfer:
    """How far a download is. Written by its thread, read by the event loop."""

    step: str = ""
    num_bytes: int = 0
    is_wanted: bool = True

    def advance(self, step: str, num_bytes: int) -> None:
        """Take note of further bytes. Raises _NobodyWaitsError on the download's thread."""
        if not self.is_wanted:
            raise _NobodyWaitsError
        if step != self.step:
            self.step, self.num_bytes = step, 0
        self.num_bytes += num_bytes


class Downloads:
    """Lets one download run at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Have the turn. Raises BusyError while another download has it."""
        if not self._turn.acquire(blocking=False):
            raise BusyError("another model is being downloaded: try again when it is here")
        try:
            yield
        finally:
            self._turn.release()


DOWNLOADS: Final = web.AppKey("DOWNLOADS", Downloads)


def routes(path: str) -> list[web.RouteDef]:
    """Return these routes below `path`."""
    return [web.post(f"{path}pull", pull), web.delete(f"{path}delete", delete)]


@operation(takes=PullRequest)
async def pull(request: web.Request) -> web.StreamResponse:
    """Download a model of the hub; a stream of lines says how far it is."""
    _require_allowed(request)
    body = await read_json(request, PullRequest, any_type=True)
    lines = _pulled(body.hub_name, request.app[DOWNLOADS])
    if body.stream is False:
        async with aclosing(lines):
            return send_json([each async for each in lines][-1])
    stream = EventStream(request, request.app[CONFIG], LINES)
    async with aclosing(lines), stream:
        async for each in lines:
            await stream.send(line(each))
    return stream.response


@operation(takes=DeleteRequest)
async def delete(request: web.Request) -> web.Response:
    """Remove a model, which nobody uses, from the memory and from the hub's cache."""
    _require_allowed(request)
    body = await read_json(request, DeleteRequest, any_type=True)
    pool = request.app[POOL]
    state = await pool.find(_required(plain_name(body.model or body.name)))
    card_id = state.model.card.id
    if not state.model.is_cached:
        raise NotAllowedError(
            f"{card_id!r} is a file of a folder or list that this server reads: delete the file yourself",
            param="model",
        )
    if state.num_users:
        raise BusyError(f"{card_id!r} answers requests: delete it when they have ended")
    await pool.evict(card_id)
    await asyncio.to_thread(_remove, card_id)
    await pool.models()
    return web.Response()


async def _pulled(name: HubName, downloads: Downloads) -> AsyncGenerator[JsonObject, None]:
    """Yield the lines of a download. One that is left ends soon, and is taken up where it ended by the next."""
    yield {"status": "pulling manifest"}
    variant = await asyncio.to_thread(_variant_of, name)
    transfer = _Transfer()
    digest = f"sha256:{variant.files[0].sha256 or variant.files[0].name}"
    work = asyncio.create_task(
        asyncio.to_thread(partial(_fetch, name, variant, transfer.advance, downloads)),
        name="download",
    )
    work.add_done_callback(_retrieve)
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=_REPORT_S)
            yield _progress(transfer, digest, variant.nbytes)
        await work
    finally:
        transfer.is_wanted = False
    yield {"status": "verifying sha256 digest"}
    yield {"status": "writing manifest"}
    yield {"status": _SUCCESS}


def _retrieve(work: asyncio.Task[None]) -> None:
    """Take what a download failed with, in case that its client has left."""
    if not work.cancelled():
        work.exception()


def _progress(transfer: _Transfer, digest: str, total_bytes: int) -> JsonObject:
    if transfer.step not in ("", DOWNLOADING):
        return {"status": "verifying sha256 digest"}
    return {
        "status": f"pulling {digest.removeprefix('sha256:')[:12]}",
        "digest": digest,
        "total": total_bytes,
        "completed": min(transfer.num_bytes, total_bytes),
    }


def _variant_of(name: HubName) -> Variant:
    return choose(str(name), group_variants(hub_files(name)), name.quant)


def _fetch(
    name: HubName, variant: Variant, listener: Callable[[str, int], None], downloads: Downloads
) -> None:
    with downloads.one():
        download(name, variant, listener)


def _remove(name: str) -> None:
    """Delete the files of a cached model. Raises HubError."""
    found = tuple(model for model in cached_models() if model.name == name)
    if not found:
        raise ModelNotFoundError(f"the hub's cache has no {name!r} any more", param="model")
    remove(found)


def _require_allowed(request: web.Request) -> None:
    if not request.app[CONFIG].allows_model_changes:
        raise NotAllowedError(
            "this server's models can not be changed by clients: start it with --allow-model-changes"
        )


def _required(name: str | None) -> str:
    if not name:
        raise RequestError("name a model as ORG/REPO or ORG/REPO:QUANT", param="model")
    return name


def _hub_name(text: str | None) -> HubName:
    name = _required(plain_name(text))
    try:
        return parse_name(name)
    except HubError as error:
        raise RequestError(str(error), param="model") from error
