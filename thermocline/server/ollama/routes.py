"""Ollama's routes: from a request to a generation job and the encoder of its answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

from aiohttp import web

from thermocline import __version__
from thermocline.messages import RequestOptions
from thermocline.server.answers import PreparedAnswer, answers
from thermocline.server.core.exchange import (
    POOL,
    asked_name,
    operation,
    read_json,
    send_json,
    use_model,
)
from thermocline.server.core.generation_jobs import GenerationJob
from thermocline.server.core.prompts import chat_job
from thermocline.server.ollama import changes, embedding_routes
from thermocline.server.ollama.about import (
    INTERFACE_VERSION,
    ShownFacts,
    iso_time,
    ps_body,
    show_body,
    tags_body,
)
from thermocline.server.ollama.encoder import (
    OllamaChatEncoder,
    OllamaEncoder,
    OllamaGenerateEncoder,
)
from thermocline.server.ollama.errors import LINES, error_body
from thermocline.server.ollama.file_facts import read_facts
from thermocline.server.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
)

if TYPE_CHECKING:
    from thermocline.server.core.backend import OpenModel

R = TypeVar("R", OllamaChatRequest, OllamaGenerateRequest)

__all__ = ["PATH", "error_body", "routes"]

PATH: Final = "/api/"
"""Prefix of this interface's paths; failures below it have its error bodies."""


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
        *changes.routes(PATH),
    ]


async def version(request: web.Request) -> web.Response:
    """Say which interface this is, and whose."""
    return send_json({"version": INTERFACE_VERSION, "thermocline": __version__})


async def tags(request: web.Request) -> web.Response:
    """List the models that there are, in memory or not."""
    return send_json(tags_body(await request.app[POOL].models()))


@operation(takes=ShowRequest)
async def show(request: web.Request) -> web.Response:
    """Show one model, without loading it."""
    body = await read_json(request, ShowRequest, any_type=True)
    model = await request.app[POOL].find(asked_name(request, body.model_name))
    if model.opened is None:
        facts = await asyncio.to_thread(read_facts, model.model)
    else:
        engine = model.opened.engine
        facts = ShownFacts(engine.spec, engine.template_facts)
    return send_json(show_body(model, facts))


async def ps(request: web.Request) -> web.Response:
    """List what is loaded."""
    return send_json(ps_body(await request.app[POOL].models()))


@answers(takes=OllamaChatRequest)
async def chat(request: web.Request) -> PreparedAnswer | web.Response:
    """Answer a conversation."""
    body = await _read(request, OllamaChatRequest)
    encoder = OllamaChatEncoder(body.model, iso_time(time.time()))
    if not body.messages:
        return await _only_loaded(request, body, encoder)
    model = await _use(request, body, encoder)
    job = await chat_job(model.engine, body)
    return PreparedAnswer(job, encoder, LINES, body.is_streamed)


@answers(takes=OllamaGenerateRequest)
async def generate(request: web.Request) -> PreparedAnswer | web.Response:
    """Answer a prompt, or continue it."""
    body = await _read(request, OllamaGenerateRequest)
    encoder = OllamaGenerateEncoder(body.model, iso_time(time.time()))
    if not body.prompt:
        return await _only_loaded(request, body, encoder)
    engine = (await _use(request, body, encoder)).engine
    if body.raw:
        prompt = await engine.encode(body.prompt, max_tokens=engine.max_context_tokens)
        options = RequestOptions(speculate=body.drafters())
        job = GenerationJob((prompt,), body.sampling_params(), options=options)
    else:
        job = await chat_job(engine, body)
    return PreparedAnswer(job, encoder, LINES, body.is_streamed)


async def _read(request: web.Request, kind: type[R]) -> R:
    """Return the typed body, of any Content-Type: Ollama's clients do not all say that it is JSON.

    `Gate` has refused requests from pages of other origins.
    """
    return await read_json(request, kind, any_type=True)


async def _use(request: web.Request, body: OllamaRequest, encoder: OllamaEncoder) -> OpenModel:
    """Return the request's model, which is loaded if need be; the answer tells how long that took."""
    start_s = time.perf_counter()
    model = await use_model(request, body.model_name, keep_alive_s=body.keep_alive_s)
    encoder.load_s = time.perf_counter() - start_s
    return model


async def _only_loaded(
    request: web.Request, body: OllamaRequest, encoder: OllamaEncoder
) -> web.Response:
    """Answer a request without a prompt, which wants the model loaded, or unloaded by keep_alive 0."""
    if body.keep_alive_s == 0:
        await request.app[POOL].unload(asked_name(request, body.model_name))
        return send_json(encoder.loaded("unload"))
    await _use(request, body, encoder)
    return send_json(encoder.loaded("load"))
