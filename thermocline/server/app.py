"""The whole server: the application, its sockets, and its shutdown. Knows no route by name."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from thermocline.errors import ConfigError
from thermocline.server.anthropic import routes as anthropic_routes
from thermocline.server.core import openapi
from thermocline.server.core.access_log import log_access
from thermocline.server.core.body_reader import BodyReader
from thermocline.server.core.catalogue import OneModel
from thermocline.server.core.connection import Connection
from thermocline.server.core.exchange import BODIES, CONFIG, ERROR_BODIES, POOL, answer_errors
from thermocline.server.core.gate import GATE, IN_FLIGHT, Gate, add_headers, follow, guard
from thermocline.server.core.in_flight import InFlight
from thermocline.server.core.memory import BUDGET, MemoryBudget
from thermocline.server.core.pool import ModelPool
from thermocline.server.core.slot_folder import SlotFolder
from thermocline.server.dashboard import routes as dashboard_routes
from thermocline.server.metrics import routes as metrics_routes
from thermocline.server.metrics.telemetry import TELEMETRY, Telemetry
from thermocline.server.ollama import routes as ollama_routes
from thermocline.server.ollama.changes import DOWNLOADS, Downloads
from thermocline.server.openai import routes as openai_routes
from thermocline.server.openai.slot_routes import SLOT_FOLDER
from thermocline.server.responses import routes as responses_routes

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterator

    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.errors import ModelChangedError
    from thermocline.server.core.backend import OpenModel
    from thermocline.server.core.catalogue import Catalogue
    from thermocline.server.core.settings import ModelCard, ServerConfig

# After the engine is closed, streams write only their terminal event.
_LAST_WRITES_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens. `app` holds its parts."""

    url: str
    app: web.Application

    async def wait_opened(self) -> OpenModel:
        """Wait until the one model is open. Raises what opening raised."""
        opened = await self.app[POOL].wait_opened()
        if opened is None:
            raise RuntimeError("no model is there from the start")
        return opened

    async def wait_given_up(self) -> ModelChangedError:
        """Wait until a model's file was changed and is not opened again; return what happened."""
        return await self.app[POOL].wait_given_up()


def create_app(pool: ModelPool, config: ServerConfig) -> web.Application:
    """Return the application; the pool starts and ends with it."""
    app = web.Application(
        middlewares=[follow, log_access, answer_errors, guard],
        client_max_size=config.max_body_bytes,
    )
    app[POOL] = pool
    app[CONFIG] = config
    app[BODIES] = BodyReader(config)
    app[GATE] = Gate(config)
    app[IN_FLIGHT] = InFlight()
    app[BUDGET] = MemoryBudget(config.max_work_bytes)
    app[TELEMETRY] = Telemetry()
    app[DOWNLOADS] = Downloads()
    if config.slot_folder is not None:
        app[SLOT_FOLDER] = SlotFolder(Path(config.slot_folder), config.max_slots_bytes)
    others = (anthropic_routes, ollama_routes)
    app[ERROR_BODIES] = {part.PATH: part.error_body for part in others}
    for part in (metrics_routes, openapi, openai_routes, responses_routes, *others):
        app.add_routes(part.routes())
    dashboard_routes.install(app)
    app.cleanup_ctx.append(_pool_lifetime)
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
    """Serve one model, as `running_models` does with a catalogue of it alone."""
    catalogue = OneModel(path, engine, card, is_pinned=config.keep_alive_s is None)
    async with running_models(catalogue, config, now_s) as server:
        yield server


@asynccontextmanager
async def running_models(
    catalogue: Catalogue, config: ServerConfig, now_s: Callable[[], float] = time.monotonic
) -> AsyncIterator[RunningServer]:
    """Listen while the context is open; models that are there from the start are opened in the background.

    Leaving the context refuses new work, waits up to `config.shutdown_timeout_s` for running answers, ends the
    others with an error event, stops listening and closes the engines. now_s: the clock of requests. Raises
    ConfigError for an address at which the server can not listen.
    """
    app = create_app(ModelPool(catalogue, config), config)
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
    """Serve one model, as `serve_models` does with a catalogue of it alone."""
    catalogue = OneModel(path, engine, card, is_pinned=config.keep_alive_s is None)
    await serve_models(catalogue, config, on_listening, on_opened)


async def serve_models(
    catalogue: Catalogue,
    config: ServerConfig,
    on_listening: Callable[[str], None],
    on_opened: Callable[[Engine], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; a second one ends the process at once. For the main thread.

    on_listening(url) is called once the socket listens, on_opened(engine) once the model that is there from the start, if
    any, is open. Raises ConfigError as `running_models`, what opening that model raises, and ModelChangedError where the
    server is to end by that.
    """
    stop = asyncio.Event()
    change: ModelChangedError | None = None
    with _stop_signals(stop):
        async with running_models(catalogue, config) as server:
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
    opened = await server.app[POOL].wait_opened()
    if opened is not None and on_opened is not None:
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


async def _pool_lifetime(app: web.Application) -> AsyncIterator[None]:
    app[POOL].start()
    yield
    await app[POOL].close()


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
        await app[POOL].close()
