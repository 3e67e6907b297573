"""Answers generation requests, whatever their interface: prepares, generates, counts and sends.

Owns the order of these steps and the limits on them. An interface's routes say what to generate and how to encode it.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from thermocline.errors import BusyError, EngineClosedError, ReaderTooSlowError, RequestError
from thermocline.server.core.connection import connection_of
from thermocline.server.core.errors import AnswerTimeoutError, QueueFullError
from thermocline.server.core.exchange import CONFIG, MODEL, operation, send_parts
from thermocline.server.core.gate import GATE
from thermocline.server.core.generation_jobs import MAX_ANSWER_BYTES, run_job
from thermocline.server.core.memory import MEMORY
from thermocline.server.core.pace import Pace
from thermocline.server.core.sse import EventStream
from thermocline.server.metrics.telemetry import meter_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

    from aiohttp import web

    from thermocline.engine.api import Engine
    from thermocline.server.core.generation_jobs import GenerationJob
    from thermocline.server.core.request_clock import RequestClock
    from thermocline.server.core.sse import Framing
    from thermocline.server.core.steps import GenerationStep
    from thermocline.server.metrics.meter import AnswerMeter

Prepare: TypeAlias = "Callable[[web.Request], Awaitable[PreparedAnswer | web.Response]]"
RouteHandler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"

_LOG: Final = logging.getLogger("thermocline.server")

_REASONS: Final = (
    (BusyError, "busy"),
    (AnswerTimeoutError, "timeout"),
    (ReaderTooSlowError, "slow_reader"),
    (RequestError, "refused"),
)


class AnswerEncoder(Protocol):
    """Turns the steps of one answer into an interface's JSON. A stream sends `prelude`, then each step's `frames`.

    Another answer is built step by step, so that its end costs the event loop no more than any other step.
    """

    @property
    def prelude(self) -> bytes:
        """The frames that come before any step."""
        ...

    def frames(self, step: GenerationStep) -> bytes:
        """Return the frames of the next step; empty while it has nothing to show."""
        ...

    def take(self, step: GenerationStep) -> int:
        """Note the next step of an answer that is not streamed; return how many bytes it adds, about."""
        ...

    def body(self) -> Iterable[bytes]:
        """Return the body of an answer that is not streamed, in parts; the last step has ended the answer."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """What to generate for a request, and how to send it. ping_after_s: overrides the server's setting."""

    job: GenerationJob
    encoder: AnswerEncoder
    framing: Framing
    is_streamed: bool
    ping_after_s: float | None = None


def answers(takes: type, gives: type | None = None) -> Callable[[Prepare], RouteHandler]:
    """Make a route's handler of a function that prepares the answer, or returns it where nothing is generated.

    takes, gives: as in `operation`. Reading the body and preparing count for `request_timeout_s` too.
    """

    def handler_of(prepare: Prepare) -> RouteHandler:
        @operation(takes, gives)
        @wraps(prepare)
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                async with connection_of(request).clock.limit():
                    prepared = await prepare(request)
            except AnswerTimeoutError:
                meter_of(request).count_failure("timeout")
                raise
            if isinstance(prepared, PreparedAnswer):
                return await _send(request, prepared)
            return prepared

        return handle

    return handler_of


async def _send(request: web.Request, prepared: PreparedAnswer) -> web.StreamResponse:
    """Generate and send. When the client leaves, this is cancelled, and the generation with it."""
    encoder = prepared.encoder
    async with aclosing(_watched_steps(request, prepared.job)) as steps:
        if not prepared.is_streamed:
            await _take_all(request, encoder, steps)
            return await send_parts(request, encoder.body())
        stream = EventStream(
            request,
            request.app[CONFIG],
            prepared.framing,
            prelude=encoder.prelude,
            ping_after_s=prepared.ping_after_s,
        )
        async with stream:
            pace = Pace()
            async for step in steps:
                await stream.send(encoder.frames(step))
                await pace.step()
        return stream.response


async def _take_all(
    request: web.Request, encoder: AnswerEncoder, steps: AsyncGenerator[GenerationStep, None]
) -> None:
    """Hand the steps to the encoder. Raises RequestError for an answer that would take too much memory."""
    memory, pace, total_bytes = request[MEMORY], Pace(), 0
    async for step in steps:
        num_bytes = encoder.take(step)
        total_bytes += num_bytes
        if total_bytes > MAX_ANSWER_BYTES:
            raise RequestError(
                f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB: ask for fewer answers or log-probabilities "
                "at a time, or stream it"
            )
        memory.add(num_bytes)
        await pace.step()


async def _watched_steps(
    request: web.Request, job: GenerationJob
) -> AsyncGenerator[GenerationStep, None]:
    """Yield the steps of the job, within the limits of the server's settings, and count them.

    Raises what `run_job` does, QueueFullError instead of BusyError, and AnswerTimeoutError after `request_timeout_s`.
    """
    app, clock = request.app, connection_of(request).clock
    engine, meter = request[MODEL].engine, meter_of(request)
    options = replace(
        job.options,
        cache_salt=app[GATE].cache_salt(request, job.options.cache_salt),
        max_unread_entries=app[CONFIG].max_unread_entries,
    )
    watch = meter.begin()
    reason: str | None = "abort"
    try:
        steps = run_job(engine, replace(job, options=options), clock.elapsed_s)
        if app[CONFIG].request_timeout_s is not None:
            steps = _within_limit(steps, clock)
        async with aclosing(steps):
            async for step in steps:
                watch.step(step)
                yield step
        reason = None
    except Exception as error:
        reason = next((name for kind, name in _REASONS if isinstance(error, kind)), "error")
        if isinstance(error, ReaderTooSlowError):
            _LOG.warning("an answer was ended: %s", error)
        if isinstance(error, BusyError):
            raise await _queue_full(error, engine, meter) from error
        raise
    finally:
        if reason is not None:
            meter.count_failure(reason)


async def _within_limit(
    steps: AsyncGenerator[GenerationStep, None], clock: RequestClock
) -> AsyncGenerator[GenerationStep, None]:
    async with aclosing(steps):
        while True:
            async with clock.limit():
                step = await anext(steps, None)
            if step is None:
                return
            yield step


async def _queue_full(error: BusyError, engine: Engine, meter: AnswerMeter) -> BusyError:
    try:
        snapshot = await engine.snapshot()
    except EngineClosedError:
        return error
    wait_s = meter.retry_after_s(snapshot.num_waiting, snapshot.num_running)
    return QueueFullError(str(error), retry_after_s=wait_s)
