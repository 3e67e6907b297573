"""The routes: reads a request, asks the engine, writes the answer. Owns the order of these steps; what
bodies look like is in `schema`, `answers` and `sse`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from aiohttp import web

from thermocline.errors import EngineClosedError
from thermocline.server.answers import ChatForm, CompletionForm
from thermocline.server.backend import Backend
from thermocline.server.errors import BodyTimeoutError, MediaTypeError, error_response
from thermocline.server.schema import ChatRequest, CompletionRequest, decode_body
from thermocline.server.settings import ServerConfig
from thermocline.server.sse import EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from thermocline.messages import TokenEvent
    from thermocline.server.answers import AnswerForm

T = TypeVar("T")

BACKEND: Final = web.AppKey("BACKEND", Backend)
CONFIG: Final = web.AppKey("CONFIG", ServerConfig)


def routes() -> list[web.RouteDef]:
    """Return every route of the server."""
    return [
        web.get("/health", health),
        web.get("/v1/health", health),
        web.get("/v1/models", list_models),
        web.get("/v1/models/{id:.+}", show_model),
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
    ]


async def health(request: web.Request) -> web.Response:
    """Say whether the model can answer."""
    if not request.app[BACKEND].model.engine.is_running:
        raise EngineClosedError("the engine has stopped: restart the server")
    return _json({"status": "ok"})


async def list_models(request: web.Request) -> web.Response:
    """List the one model."""
    return _json({"object": "list", "data": [request.app[BACKEND].model.as_body()]})


async def show_model(request: web.Request) -> web.Response:
    """Show one model."""
    model = request.app[BACKEND].model
    model.check_name(request.match_info["id"])
    return _json(model.as_body())


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    model = request.app[BACKEND].model
    asked = await _read(request, ChatRequest)
    model.check_name(asked.model)
    params = asked.sampling_params()
    engine = model.engine
    form = ChatForm(
        model.card.id, model.fingerprint, engine.tokenizer, include_usage=asked.include_usage
    )
    prompt = await engine.encode_chat(asked.messages)
    return await _answer(request, engine.generate(prompt, params), form, stream=asked.stream)


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue a text."""
    model = request.app[BACKEND].model
    asked = await _read(request, CompletionRequest)
    model.check_name(asked.model)
    params = asked.sampling_params()
    engine = model.engine
    form = CompletionForm(
        model.card.id, model.fingerprint, engine.tokenizer, include_usage=asked.include_usage
    )
    events = engine.generate(asked.single_prompt(), params)
    return await _answer(request, events, form, stream=asked.stream)


async def _answer(
    request: web.Request,
    events: AsyncGenerator[TokenEvent, None],
    form: AnswerForm,
    *,
    stream: bool | None,
) -> web.StreamResponse:
    """Send what `events` brings. When the client leaves, this is cancelled, and `events` closed."""
    async with aclosing(events):
        if not stream:
            return _json(form.whole([event async for event in events]))
        response = EventStream(request, request.app[CONFIG], form.prelude())
        async with response:
            async for event in events:
                await response.send(form.pieces(event))
        return response.response


async def _read(request: web.Request, kind: type[T]) -> T:
    """Return the typed body. Raises RequestError for all that can be wrong with it."""
    if request.content_type != "application/json":
        # A web page can send other types to any address without asking first.
        raise MediaTypeError("send the header Content-Type: application/json")
    if "Content-Encoding" in request.headers:
        raise MediaTypeError("send the body as it is, without Content-Encoding")
    timeout_s = request.app[CONFIG].body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            raw = await request.read()
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body did not arrive within {timeout_s:g} s: send it faster"
        ) from error
    return decode_body(raw, kind)


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
    """Turn every failure into OpenAI's error body."""
    try:
        response: web.StreamResponse = await handler(request)
    except Exception as error:  # noqa: BLE001 - the edge: whatever it is, the client gets an answer
        return error_response(error)
    return response


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
