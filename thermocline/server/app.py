"""The server as a whole: the application, its sockets, and how it ends. Knows no route by name."""

from __future__ import annotations

import asyncio
import signal
import uuid
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from thermocline import __version__
from thermocline.errors import ConfigError
from thermocline.server.backend import Backend
from thermocline.server.errors import HostRefusedError
from thermocline.server.own import routes as own
from thermocline.server.routes import BACKEND, CONFIG, answer_errors, routes

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterator

    from thermocline.config import EngineConfig
    from thermocline.server.backend import OpenModel
    from thermocline.server.settings import ModelCard, ServerConfig

# After the engine is closed, answers have only their last event to write.
_LAST_WRITES_S: Final = 2.0


class InFlight:
    """Counts the requests that are being handled."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return self._count

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one request while the context is open."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until there is none."""
        await self._idle.wait()


IN_FLIGHT: Final = web.AppKey("IN_FLIGHT", InFlight)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens. `app` holds what it consists of."""

    url: str
    app: web.Application

    async def wait_opened(self) -> OpenModel:
        """Wait until the model is open. Raises what opening raised."""
        return await self.app[BACKEND].wait_opened()


def create_app(backend: Backend, config: ServerConfig) -> web.Application:
    """Return the application; the backend starts and ends with it."""
    app = web.Application(
        middlewares=[_count, answer_errors, _check_host], client_max_size=config.max_body_bytes
    )
    app[BACKEND] = backend
    app[CONFIG] = config
    app[IN_FLIGHT] = InFlight()
    app.add_routes(routes())
    own.install(app)
    app.cleanup_ctx.append(_backend_lifetime)
    app.on_shutdown.append(_drain)
    app.on_response_prepare.append(_add_headers)
    return app


@asynccontextmanager
async def running_server(
    path: str | os.PathLike[str], engine: EngineConfig, config: ServerConfig, card: ModelCard
) -> AsyncIterator[RunningServer]:
    """Listen while the context is open; the model is opened meanwhile.

    Leaving it stops listening, waits for running answers (`config.shutdown_timeout_s`), ends those
    that remain with an error event, and closes the engine. Raises ConfigError for an address that
    can not be had.
    """
    app = create_app(Backend(path, engine, card), config)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # routes refuse compressed bodies
        shutdown_timeout=_LAST_WRITES_S,
    )
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, config.bind_host, config.port).start()
        except OSError as error:
            raise ConfigError(
                f"can not listen at {config.url(config.port)} ({error.strerror}): choose another "
                "--port, 0 picks a free one"
            ) from error
        yield RunningServer(config.url(runner.addresses[0][1]), app)
    finally:
        await runner.cleanup()


async def serve(
    path: str | os.PathLike[str],
    engine: EngineConfig,
    config: ServerConfig,
    card: ModelCard,
    on_listening: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once. For the main thread.

    on_listening(url) is called once the socket listens. Raises ConfigError as `running_server`, and
    what opening the model raises.
    """
    stop = asyncio.Event()
    with _stop_signals(stop):
        async with running_server(path, engine, config, card) as server:
            on_listening(server.url)
            opening = asyncio.create_task(server.wait_opened(), name="opening")
            stopping = asyncio.create_task(stop.wait(), name="stop signal")
            try:
                await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    opening.result()
                    await stopping
            finally:
                opening.cancel()
                stopping.cancel()


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the fastest event loop here, None for Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextmanager
def _stop_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first signal; the second one finds the system's own handling."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _backend_lifetime(app: web.Application) -> AsyncIterator[None]:
    backend = app[BACKEND]
    backend.start()
    yield
    await backend.close()


async def _drain(app: web.Application) -> None:
    """Let running answers end, but not for ever. Runs when nothing listens any more."""
    try:
        async with asyncio.timeout(app[CONFIG].shutdown_timeout_s):
            await app[IN_FLIGHT].wait_idle()
    except TimeoutError:
        await app[BACKEND].close()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = f"thermocline/{__version__}"
    response.headers["X-Request-Id"] = f"req_{uuid.uuid4().hex}"


@web.middleware
async def _count(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    with request.app[IN_FLIGHT].one():
        response: web.StreamResponse = await handler(request)
        return response


@web.middleware
async def _check_host(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or not request.app[CONFIG].admits(hosts[0]):
        raise HostRefusedError(
            "the Host header names another machine: use the address that the server printed"
        )
    response: web.StreamResponse = await handler(request)
    return response
