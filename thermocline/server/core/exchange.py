"""What every interface's routes share: reading a JSON body, sending JSON, and answering failures.

Owns the keys under which the application keeps its parts. Knows no interface's bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from thermocline.errors import RequestError
from thermocline.server.core.backend import OpenModel
from thermocline.server.core.bodies import decode_body, unknown_fields
from thermocline.server.core.body_reader import BodyReader
from thermocline.server.core.errors import error_body, error_response
from thermocline.server.core.gate import HELD
from thermocline.server.core.memory import MEMORY, RequestMemory
from thermocline.server.core.pool import ModelPool
from thermocline.server.core.settings import ServerConfig

T = TypeVar("T", bound=msgspec.Struct)

Handler = TypeVar("Handler", bound=Callable[[web.Request], Awaitable[web.StreamResponse]])

_SENT_AT_ONCE_BYTES: Final = 1 << 18
# What requests of fewer bytes freed is used again by the next ones.
_RETURNED_BYTES: Final = 1 << 20

ErrorEncoder: TypeAlias = Callable[[BaseException], object]
"""Returns the body with which an interface answers a failure."""

POOL: Final = web.AppKey("POOL", ModelPool)
MODEL: Final = web.RequestKey("MODEL", OpenModel)
"""The model that a request uses, after `use_model`."""
CONFIG: Final = web.AppKey("CONFIG", ServerConfig)
BODIES: Final = web.AppKey("BODIES", BodyReader)
ERROR_BODIES: Final[web.AppKey[Mapping[str, ErrorEncoder]]] = web.AppKey("ERROR_BODIES", Mapping)
"""By the prefix of a path; OpenAI's holds for all other paths."""


def operation(
    takes: type | None = None,
    gives: type | None = None,
    query: Mapping[str, object] | None = None,
) -> Callable[[Handler], Handler]:
    """Note the types of a route's bodies and of its query parameters, which /openapi.json shows."""

    def note(handler: Handler) -> Handler:
        handler.takes, handler.gives, handler.query = takes, gives, query  # type: ignore[attr-defined]
        return handler

    return note


def asked_name(request: web.Request, name: str | None) -> str | None:
    """Return the model's name in a request; None, which is any, where the server takes every name."""
    return None if request.app[CONFIG].any_model else name


async def use_model(
    request: web.Request, name: str | None, *, keep_alive_s: float | None = None
) -> OpenModel:
    """Return the model that a request names, which stays in memory until the request's end. It is loaded if need be.

    Raises what `ModelPool.lease` raises.
    """
    lease = await request.app[POOL].lease(asked_name(request, name), keep_alive_s)
    request[HELD].callback(lease.release)
    request[HELD].callback(_return_memory, request[MEMORY], lease.model)
    request[MODEL] = lease.model
    return lease.model


def _return_memory(memory: RequestMemory, model: OpenModel) -> None:
    if memory.num_bytes > _RETURNED_BYTES:
        model.engine.offload.return_memory()


def shown_model(request: web.Request) -> OpenModel:
    """Return the model that a page is about: ?model=NAME, else the one that was used last. Loads none.

    Raises what `ModelPool.opened` raises.
    """
    return request.app[POOL].opened(request.query.get("model"))


async def read_json(request: web.Request, kind: type[T], *, any_type: bool = False) -> T:
    """Return the typed body. Raises RequestError for any fault in it, and for unknown fields with --strict-params.

    any_type: take a body whose Content-Type is not JSON.
    """
    body, _ = await read_with_unknown(request, kind, any_type=any_type)
    return body


async def read_with_unknown(
    request: web.Request, kind: type[T], *, any_type: bool = False
) -> tuple[T, list[str]]:
    """Return the typed body, and the names of its unknown fields. Raises like `read_json`."""
    bodies = request.app[BODIES]
    raw = await bodies.read(request, any_type=any_type)
    body = decode_body(raw, kind)
    await bodies.turn(len(raw))
    unknown = unknown_fields(raw, kind)
    if unknown and request.app[CONFIG].strict_params:
        raise RequestError(
            f"{unknown[0]} is no field of this interface: leave it out, or start the server without "
            "--strict-params",
            param=unknown[0],
        )
    return body, unknown


def send_json(body: object, status: int = 200) -> web.Response:
    """Return the response with `body`, of any type that msgspec can encode."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


async def send_parts(request: web.Request, parts: Iterable[bytes]) -> web.StreamResponse:
    """Send a JSON body that is made part by part. A long one is sent while it is made, as its client reads."""
    remaining = iter(parts)
    begin = bytearray()
    for part in remaining:
        begin += part
        if len(begin) > _SENT_AT_ONCE_BYTES:
            break
    else:
        return web.Response(body=bytes(begin), content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for part in chain([bytes(begin)], remaining):
        view = memoryview(part)
        for start in range(0, len(view), _SENT_AT_ONCE_BYTES):
            await response.write(view[start : start + _SENT_AT_ONCE_BYTES])
            await asyncio.sleep(0)
    await response.write_eof()
    return response


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    """Turn every failure into the error body of the interface that the path belongs to."""
    try:
        response: web.StreamResponse = await handler(request)
    except Exception as error:  # noqa: BLE001 - the edge: every failure becomes a response
        bodies = request.app[ERROR_BODIES]
        fits = (body for start, body in bodies.items() if request.path.startswith(start))
        return error_response(error, next(fits, error_body))
    return response
