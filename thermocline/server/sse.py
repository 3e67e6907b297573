"""Server-sent events: framing, signs of life, and exactly one terminal event.

Knows aiohttp's responses and JSON, but neither engine nor OpenAI's bodies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
from aiohttp import web

from thermocline.server.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from thermocline.server.settings import ServerConfig

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def frame(body: object) -> bytes:
    """Return `body` as one event."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


class EventStream:
    """One response of events. Use it as a context, and `response` after it.

    The response starts with the first `send`, or without one after `config.open_after_s`, with
    `prelude` in front. A failure before that leaves the context as an exception, to be answered
    plainly; one after it becomes the terminal event instead of [DONE]. A client that has left ends
    the context quietly.
    """

    def __init__(
        self, request: web.Request, config: ServerConfig, prelude: Sequence[dict[str, Any]]
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._config = config
        self._prelude = b"".join(map(frame, prelude))
        self._is_open = False
        # Held while a frame is on its way, so that a sign of life waits for a slow reader too.
        self._sending = asyncio.Lock()
        self._last_sent_s = 0.0
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._show_life(), name="event stream keep-alive")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        assert self._keeper is not None
        has_failed = isinstance(error, Exception) and not isinstance(error, ConnectionError)
        try:
            if error is None or has_failed:
                async with self._sending:
                    self._keeper.cancel()
            if error is None:
                await self._end(DONE)
            elif has_failed and self._is_open:
                await self._end(frame(error_body(error)))
                return True
        except ConnectionError:
            return not has_failed or self._is_open
        finally:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        return isinstance(error, ConnectionError)

    async def send(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Write the events of `bodies`; waits only for this client's own socket."""
        if bodies:
            async with self._sending:
                await self._write(b"".join(map(frame, bodies)))

    async def _end(self, terminal: bytes) -> None:
        await self._write(terminal)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        if not self._is_open:
            self._is_open = True
            await self.response.prepare(self._request)
            data = self._prelude + data
        if data:
            await self.response.write(data)
        self._last_sent_s = asyncio.get_running_loop().time()

    async def _show_life(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._config.open_after_s)
        try:
            async with self._sending:
                if not self._is_open:
                    await self._write(b"")
            while True:
                due_s = self._last_sent_s + self._config.ping_after_s
                if loop.time() < due_s:
                    await asyncio.sleep(due_s - loop.time())
                    continue
                async with self._sending:
                    if loop.time() >= self._last_sent_s + self._config.ping_after_s:
                        await self._write(PING)
        except ConnectionError:
            # The client has left; the request's own task is being cancelled.
            return
