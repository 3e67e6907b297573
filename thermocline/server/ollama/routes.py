"""Ollama's routes: from a request to a generation job and the encoder of its answer."""

from __future__ import annotations

import time
from typing import Any, Final, TypeVar

from aiohttp import web

from thermocline import __version__
from thermocline.messages import RequestOptions
from thermocline.server.answers import PreparedAnswer, answers
from thermocline.server.core.errors import message_of
from thermocline.server.core.exchange import (
    BACKEND,
    check_model,
    operation,
    read_json,
    send_json,
)
from thermocline.server.core.generation_jobs import GenerationJob
from thermocline.server.core.prompts import chat_job
from thermocline.server.core.sse import Framing
from thermocline.server.ollama import embedding_routes
from thermocline.server.ollama.about import (
    INTERFACE_VERSION,
    iso_time,
    ps_body,
    show_body,
    tags_body,
)
from thermocline.server.ollama.encoder import OllamaChatEncoder, OllamaGenerateEncoder, line
from thermocline.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, ShowRequest

R = TypeVar("R", ShowRequest, OllamaChatRequest, OllamaGenerateRequest)

PATH: Final = "/api/"
"""Prefix of this interface's paths; failures below it have its error bodies."""


def error_body(error: BaseException) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": message_of(error)}


_LINES: Final = Framing(
    error=lambda error: line(error_body(error)), ping=b"", content_type="application/x-ndjson"
)


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        web.get(f"{PATH}version", version),
        web.get(f"{PATH}tags", tags),
        web.post(f"{PATH}show", show),
        web.get(f"{PATH}ps", ps),
        web.post(f"{PATH}chat", chat),
        web.post(f"{PATH}generate", generate),
        web.post(f"{PATH}embed", embedding_routes.embed),
        web.post(f"{PATH}embeddings", embedding_routes.embeddings),
    ]


async def version(request: web.Request) -> web.Response:
    """Say which interface this is, and whose."""
    return send_json({"version": INTERFACE_VERSION, "thermocline": __version__})


async def tags(request: web.Request) -> web.Response:
    """List the one model."""
    return send_json(tags_body(request.app[BACKEND].model))


@operation(takes=ShowRequest)
async def show(request: web.Request) -> web.Response:
    """Show one model."""
    model = request.app[BACKEND].model
    await _read(request, ShowRequest)
    return send_json(show_body(model))


async def ps(request: web.Request) -> web.Response:
    """List what is loaded."""
    return send_json(ps_body(request.app[BACKEND].model))


@answers(takes=OllamaChatRequest)
async def chat(request: web.Request) -> PreparedAnswer | web.Response:
    """Answer a conversation."""
    model = request.app[BACKEND].model
    body = await _read(request, OllamaChatRequest)
    encoder = OllamaChatEncoder(body.model, iso_time(time.time()))
    if not body.messages:
        return send_json(encoder.loaded())
    job = await chat_job(model.engine, body)
    return PreparedAnswer(job, encoder, _LINES, body.is_streamed)


@answers(takes=OllamaGenerateRequest)
async def generate(request: web.Request) -> PreparedAnswer | web.Response:
    """Answer a prompt, or continue it."""
    engine = request.app[BACKEND].model.engine
    body = await _read(request, OllamaGenerateRequest)
    encoder = OllamaGenerateEncoder(body.model, iso_time(time.time()))
    if not body.prompt:
        return send_json(encoder.loaded())
    if body.raw:
        prompt = await engine.encode(body.prompt, max_tokens=engine.max_context_tokens)
        options = RequestOptions(speculate=body.drafters())
        job = GenerationJob((prompt,), body.sampling_params(), options=options)
    else:
        job = await chat_job(engine, body)
    return PreparedAnswer(job, encoder, _LINES, body.is_streamed)


async def _read(request: web.Request, kind: type[R]) -> R:
    """Return the typed body, of any Content-Type: Ollama's clients do not all say that it is JSON.

    `Gate` has refused requests from pages of other origins.
    """
    body = await read_json(request, kind, any_type=True)
    check_model(request, body.model_name)
    return body
