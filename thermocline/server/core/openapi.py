"""Describes the server's routes and the types of their bodies as an OpenAPI document."""

from __future__ import annotations

import inspect
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from thermocline import __version__
from thermocline.server.core.exchange import send_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_VARIABLE: Final = re.compile(r"\{(\w+)\}")
_REF: Final = "#/components/schemas/{name}"


# By the folder of a route; what is not named here is "Server".
_TAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "openai": "OpenAI",
        "responses": "OpenAI Responses",
        "anthropic": "Anthropic",
        "ollama": "Ollama",
        "dashboard": "Dashboard",
        "metrics": "Metrics",
    }
)


class ErrorFields(msgspec.Struct):
    """What went wrong, and what to do about it."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's answer to a request that failed."""

    error: ErrorFields


def routes() -> list[web.RouteDef]:
    """Return this route."""
    return [web.get("/openapi.json", openapi)]


async def openapi(request: web.Request) -> web.Response:
    """Describe every route of this server."""
    return send_json(describe_routes(request.app.router.routes()))


def describe_routes(given: Iterable[web.AbstractRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes; types are what `exchange.operation` noted."""
    described = [
        (route.resource.canonical, route)
        for route in given
        if route.resource is not None and route.method not in ("HEAD", "*")
    ]
    types: set[type] = {ErrorBody}
    for _, route in described:
        types |= {kind for kind in _types(route) if kind is not None}
    ordered = sorted(types, key=lambda kind: (kind.__module__, kind.__qualname__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, route in described:
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "thermocline", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": components},
    }


def _types(route: web.AbstractRoute) -> tuple[type | None, type | None]:
    return getattr(route.handler, "takes", None), getattr(route.handler, "gives", None)


def _tag(route: web.AbstractRoute) -> str:
    """Return the interface of a route: what its module's folder is called."""
    folders = route.handler.__module__.split(".")
    return next((_TAGS[folder] for folder in folders if folder in _TAGS), "Server")


def _operation(
    route: web.AbstractRoute, path: str, schema_of: dict[type, dict[str, Any]]
) -> dict[str, Any]:
    takes, gives = _types(route)
    content: dict[str, Any] = {
        "application/json": {"schema": {} if gives is None else schema_of[gives]}
    }
    if takes is not None and "stream" in getattr(takes, "__struct_fields__", ()):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    slug = re.sub(r"\W+", "_", path).strip("_") or "root"
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{slug}",
        "tags": [_tag(route)],
        "summary": inspect.getdoc(route.handler) or "",
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "What went wrong.",
                "content": {"application/json": {"schema": schema_of[ErrorBody]}},
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _VARIABLE.findall(path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": msgspec.json.schema(kind)}
        for name, kind in (getattr(route.handler, "query", None) or {}).items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if takes is not None:
        body = {"application/json": {"schema": schema_of[takes]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
