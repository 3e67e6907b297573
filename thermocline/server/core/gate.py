"""Checks every request before its route runs, and gives every response its headers.

Turns the decisions of `access` into answers. Knows no route but those that need no key.
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from thermocline import __version__
from thermocline.server.core.access import KeyRing, OriginRules
from thermocline.server.core.connection import connection_of
from thermocline.server.core.errors import (
    DrainingError,
    HostRefusedError,
    KeyRefusedError,
    OriginRefusedError,
)
from thermocline.server.core.in_flight import InFlight
from thermocline.server.core.memory import BUDGET, MEMORY

if TYPE_CHECKING:
    from thermocline.server.core.settings import ServerConfig

IN_FLIGHT: Final = web.AppKey("IN_FLIGHT", InFlight)
REQUEST_ID: Final = web.RequestKey("REQUEST_ID", str)
HELD: Final = web.RequestKey("HELD", ExitStack)
"""What a request has until its answer has ended."""

# The pages' files hold nothing of the model; a page itself asks for the key.
_OPEN_PATHS: Final = frozenset({"/health", "/v1/health", "/", "/docs"})
_OPEN_FOLDER: Final = "/page/"
# Of this server's own files only. A page with code in itself sends a policy with that code's hash instead.
_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Gate:
    """Decides by one server's settings which requests are served."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._keys = KeyRing(config.api_keys)
        self._origins = OriginRules(config.cors_origins)

    def check(self, request: web.Request) -> None:
        """Raise RequestError for a request with another machine's Host, a foreign Origin, or no key."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._config.admits(hosts[0]):
            raise HostRefusedError(
                "the Host header names another machine: use the address that the server printed, or "
                "add the name to --allowed-hosts"
            )
        origin = request.headers.get("Origin")
        if (
            request.method not in ("GET", "HEAD", "OPTIONS")
            and origin is not None
            and not self._origins.allows(origin, hosts[0])
        ):
            raise OriginRefusedError(
                "a web page of another origin sent this: add the origin to --cors-origins"
            )
        is_open = request.path in _OPEN_PATHS or request.path.startswith(_OPEN_FOLDER)
        if not is_open and not self._keys.opens(request.headers):
            raise KeyRefusedError(
                "this server wants an API key: send it as Authorization: Bearer KEY"
            )

    def knows(self, request: web.Request) -> bool:
        """Whether the request has a key that opens this server, or it wants none."""
        return self._keys.opens(request.headers)

    def cache_salt(self, request: web.Request, salt: str | None) -> str | None:
        """Return the salt of the request's prefix cache: one for each API key and salt of the request.

        With a shared cache, the speed of an answer would tell the holder of one key what another's prompts were.
        """
        owner = self._keys.owner(request.headers)
        return f"{owner}:{salt or ''}" if owner else salt

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a CORS preflight request from an allowed origin; None for other requests.

        Preflight requests carry no key.
        """
        headers = request.headers
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in headers
        if not is_preflight or not self._origins.allows(headers.get("Origin", ""), headers["Host"]):
            return None
        requested_headers = headers.get("Access-Control-Request-Headers", "")
        return web.Response(status=204, headers=self._origins.preflight_headers(requested_headers))

    def response_headers(
        self, request: web.Request, response: web.StreamResponse
    ) -> dict[str, str]:
        """Return the headers that the response should carry."""
        headers = {
            "Server": f"thermocline/{__version__}",
            "X-Request-Id": request.get(REQUEST_ID) or _new_id(),
            "X-Content-Type-Options": "nosniff",
            **self._origins.response_headers(request.headers.get("Origin")),
        }
        if "Access-Control-Allow-Origin" not in headers:
            headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if response.content_type == "text/html":
            headers |= {
                "Content-Security-Policy": _PAGE_POLICY,
                "Referrer-Policy": "no-referrer",
                "X-Frame-Options": "DENY",
            }
        if response.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


GATE: Final = web.AppKey("GATE", Gate)


@web.middleware
async def follow(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    """Tell the connection which request it carries, count the work in flight, and give it a share of the memory."""
    connection = connection_of(request)
    connection.begin_request(request)
    request[REQUEST_ID] = _new_id()
    in_flight = request.app[IN_FLIGHT]
    try:
        # Shutdown waits for POSTs only: a GET such as the stream of events changes nothing.
        with (
            in_flight.one() if request.method == "POST" else nullcontext(),
            request.app[BUDGET].share() as memory,
            ExitStack() as held,
        ):
            request[MEMORY], request[HELD] = memory, held
            response: web.StreamResponse = await handler(request)
            return response
    finally:
        connection.end_request()


@web.middleware
async def guard(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    """Refuse requests that `Gate` refuses, and new work while the server shuts down."""
    gate = request.app[GATE]
    if (answer := gate.preflight(request)) is not None:
        return answer
    gate.check(request)
    if request.method == "POST" and request.app[IN_FLIGHT].is_draining:
        raise DrainingError("the server is shutting down: send the request elsewhere, or later")
    response: web.StreamResponse = await handler(request)
    return response


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Give a response its headers; a policy that a page brings stays."""
    policy = response.headers.get("Content-Security-Policy")
    response.headers.update(request.app[GATE].response_headers(request, response))
    if policy is not None:
        response.headers["Content-Security-Policy"] = policy
