"""Receives bodies within limits of size, time, depth and total size. Knows no field of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web

from thermocline.errors import BusyError
from thermocline.server.core.errors import BodyTimeoutError, MediaTypeError
from thermocline.server.core.json_shape import ShapeCheck
from thermocline.server.core.memory import MEMORY

if TYPE_CHECKING:
    from thermocline.server.core.settings import ServerConfig


_LARGE_BYTES: Final = 1 << 16
# A chat of hundreds of short messages has some kilobytes, and takes the loop a millisecond or two.
_TURN_BYTES: Final = 1 << 12
# The body, its texts, and what is made of them. A text with one emoji has four bytes for each character.
_BYTES_PER_BYTE: Final = 8
# The body as it is received and as a whole, and a text of plain letters: the rest of a body of many small values.
_COPIES: Final = 3


class BodyReader:
    """Receives the bodies of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._total_bytes = 0
        """Bytes received of bodies that are not complete."""
        self._turns = asyncio.Lock()

    async def read(self, request: web.Request, *, any_type: bool = False) -> bytes:
        """Return a body whose Content-Type is JSON; any_type: take every Content-Type.

        Raises RequestError, HTTPRequestEntityTooLarge, or BusyError while the bodies of all requests are too large, or
        what is being answered takes too much memory.
        """
        if not any_type and request.content_type != "application/json":
            # A web page of any origin can send other types without a CORS preflight.
            raise MediaTypeError("send the header Content-Type: application/json")
        if "Content-Encoding" in request.headers:
            raise MediaTypeError("send the body as it is, without Content-Encoding")
        self._check_size(request.content_length or 0)
        timeout_s = self._config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                body, values_bytes = await self._receive(request)
        except TimeoutError as error:
            raise BodyTimeoutError(
                f"the body did not arrive within {timeout_s:g} s: send it faster"
            ) from error
        work_bytes = max(_BYTES_PER_BYTE * len(body), _COPIES * len(body) + values_bytes)
        if work_bytes > _BYTES_PER_BYTE * _LARGE_BYTES:
            request[MEMORY].add(work_bytes)
        await self.turn(work_bytes // _BYTES_PER_BYTE)
        return body

    async def turn(self, num_bytes: int) -> None:
        """Return with no other such turn in the same round of the loop, for work on a body of so many bytes.

        Looking at a piece of a large one takes some milliseconds, decoding it some 10, and many may arrive and end at
        once. Short bodies need no turn.
        """
        if num_bytes > _TURN_BYTES:
            async with self._turns:
                await asyncio.sleep(0)

    async def _receive(self, request: web.Request) -> tuple[bytes, int]:
        """Return a body, and the bytes that its values take beside its texts."""
        body = bytearray()
        shape = ShapeCheck()
        try:
            async for piece in request.content.iter_any():
                body += piece
                self._total_bytes += len(piece)
                self._check_size(len(body))
                if self._total_bytes > self._config.max_total_body_bytes:
                    raise BusyError("too many large bodies are being received: try again later")
                await self.turn(len(body))
                shape.feed(piece)
        finally:
            self._total_bytes -= len(body)
        return bytes(body), shape.decoded_bytes

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._config.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._config.max_body_bytes, num_bytes)
