"""The whole server: the application, its sockets, and its shutdown. Knows no route by name."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from aiohttp import web

from thermocline.errors import ConfigError
from thermocline.server.anthropic import routes as anthropic_routes
from thermocline.server.core import openapi
from thermocline.server.core.access_log import log_access
from thermocline.server.core.backend import Backend
from thermocline.server.core.body_reader import BodyReader
from thermocline.server.core.connection import Connection
from thermocline.server.core.exchange import BACKEND, BODIES, CONFIG, ERROR_BODIES, answer_errors
from thermocline.server.core.gate import GATE, IN_FLIGHT, Gate, add_headers, follow, guard
from thermocline.server.core.in_flight import InFlight
from thermocline.server.core.memory import BUDGET, MemoryBudget
from thermocline.server.dashboard import routes as dashboard_routes
from thermocline.server.metrics import routes as metrics_routes
from thermocline.server.metrics.telemetry import TELEMETRY, Telemetry
from thermocline.server.ollama import routes as ollama_routes
from thermocline.server.openai import routes as openai_routes
from thermocline.server.responses import routes as responses_routes

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterator

    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.errors import ModelChangedError
    from thermocline.server.core.backend import OpenModel
    from thermocline.server.core.settings import ModelCard, ServerConfig

# After the engine is closed, streams write only their terminal event.
_LAST_WRITES_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens. `app` holds its parts."""

    url: str
    app: web.Application

    async def wait_opened(self) -> OpenModel:
        """Wait until the model is open. Raises what opening raised."""
        return await self.app[BACKEND].wait_opened()

    async def wait_given_up(self) -> ModelChangedError:
        """Wait until the model's file was changed and is not opened again; return what happened."""
        return await self.app[BACKEND].wait_given_up()


def create_app(backend: Backend, config: ServerConfig) -> web.Application:
    """Return the application; the backend starts and ends with it."""
    app = web.Application(
        middlewares=[follow, log_access, answer_errors, guard],
        client_max_size=config.max_body_bytes,
    )
    app[BACKEND] = backend
    app[CONFIG] = config
    app[BODIES] = BodyReader(config)
    app[GATE] = Gate(config)
    app[IN_FLIGHT] = InFlight()
    app[BUDGET] = MemoryBudget(config.max_work_bytes)
    app[TELEMETRY] = Telemetry()
    others = (anthropic_routes, ollama_routes)
    app[ERROR_BODIES] = {part.PATH: part.error_body for part in others}
    for part in (metrics_routes, openapi, openai_routes, responses_routes, *others):
        app.add_routes(part.routes())
    dashboard_routes.install(app)
    app.cleanup_ctx.append(_backend_lifetime)
    app.cleanup_ctx.append(_watch_loop)
    app.on_response_prepare.append(add_headers)
    return app


@asynccontextmanager
async def running_server(
    path: str | os.PathLike[str],
    engine: EngineConfig,
    config: ServerConfig,
    card: ModelCard,
    now_s: Callable[[], float] = time.monotonic,
) -> AsyncIterator[RunningServer]:
    """Listen while the context is open; the model is opened in the background.

    Leaving the context refuses new work, waits up to `config.shutdown_timeout_s` for running answers, ends the
    others with an error event, stops listening and closes the engine. now_s: the clock of requests. Raises
    ConfigError for an address at which the server can not listen.
    """
    backend = Backend(path, engine, card, reopens=config.on_model_change == "reopen")
    app = create_app(backend, config)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_LAST_WRITES_S)
    try:
        await runner.setup()
        listener = await _listen(runner, app, config, now_s)
        try:
            yield RunningServer(config.url(listener.sockets[0].getsockname()[1]), app)
        finally:
            await _drain(app)
            listener.close()
    finally:
        await runner.cleanup()


async def serve(
    path: str | os.PathLike[str],
    engine: EngineConfig,
    config: ServerConfig,
    card: ModelCard,
    on_listening: Callable[[str], None],
    on_opened: Callable[[Engine], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; a second one ends the process at once. For the main thread.

    on_listening(url) is called once the socket listens, on_opened(engine) once the model is open. Raises ConfigError as
    `running_server`, what opening the model raises, and ModelChangedError where the server is to end by that.
    """
    stop = asyncio.Event()
    change: ModelChangedError | None = None
    with _stop_signals(stop):
        async with running_server(path, engine, config, card) as server:
            on_listening(server.url)
            opening = asyncio.create_task(_wait_opened(server, on_opened), name="opening")
            stopping = asyncio.create_task(stop.wait(), name="stop signal")
            giving_up = asyncio.create_task(server.wait_given_up(), name="end by a changed model")
            first = asyncio.FIRST_COMPLETED
            try:
                await asyncio.wait({opening, stopping}, return_when=first)
                if opening.done():
                    opening.result()
                    await asyncio.wait({stopping, giving_up}, return_when=first)
                    change = giving_up.result() if giving_up.done() else None
            finally:
                opening.cancel()
                stopping.cancel()
                giving_up.cancel()
    if change is not None:
        raise change


async def _wait_opened(server: RunningServer, on_opened: Callable[[Engine], None] | None) -> None:
    """Hand over the engine, and keep no hold of it: it may be followed by another one."""
    opened = await server.wait_opened()
    if on_opened is not None:
        on_opened(opened.engine)


@contextmanager
def _stop_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first signal; the second one ends the process."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it to stay ignored
        numbers.append(signal.SIGHUP)

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


async def _watch_loop(app: web.Application) -> AsyncIterator[None]:
    watch = asyncio.create_task(app[TELEMETRY].lag.watch(), name="loop lag")
    yield
    watch.cancel()
    await asyncio.wait({watch})


async def _listen(
    runner: web.AppRunner,
    app: web.Application,
    config: ServerConfig,
    now_s: Callable[[], float],
) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if runner.server is None:
        raise RuntimeError("the runner must be set up before it listens")
    connections = app[TELEMETRY].connections
    connect = partial(Connection, runner.server, config, connections, now_s, loop=loop)
    try:
        listener = await loop.create_server(
            connect, config.bind_host, config.port, backlog=config.max_connections
        )
    except OSError as error:
        raise ConfigError(
            f"can not listen at {config.url(config.port)} ({error.strerror}): choose another "
            "--port, 0 picks a free one"
        ) from error
    for listening in listener.sockets:
        # Accepted sockets inherit it. Without it, each could hold megabytes that its client does not read.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
    return listener


async def _drain(app: web.Application) -> None:
    """Refuse new work, and wait for running answers until the timeout."""
    app[IN_FLIGHT].drain()
    try:
        async with asyncio.timeout(app[CONFIG].shutdown_timeout_s):
            await app[IN_FLIGHT].wait_idle()
    except TimeoutError:
        await app[BACKEND].close()
