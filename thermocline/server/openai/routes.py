"""OpenAI's routes: reads a request, asks the engine, writes the answer. Owns the order of these steps."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from aiohttp import web

from thermocline.server.answering import Ask
from thermocline.server.exchange import BACKEND, read_json, send_json, send_stream
from thermocline.server.openai.chat_form import ChatForm
from thermocline.server.openai.completion_form import CompletionForm
from thermocline.server.openai.form import EVENTS, FormOptions, Served
from thermocline.server.openai.schema import ChatRequest, CompletionRequest
from thermocline.server.watching import watched_answer

if TYPE_CHECKING:
    from thermocline.server.backend import OpenModel
    from thermocline.server.openai.form import AnswerForm


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        web.get("/v1/models", list_models),
        web.get("/v1/models/{id:.+}", show_model),
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
    ]


async def list_models(request: web.Request) -> web.Response:
    """List the one model."""
    return send_json({"object": "list", "data": [request.app[BACKEND].model.as_body()]})


async def show_model(request: web.Request) -> web.Response:
    """Show one model."""
    model = request.app[BACKEND].model
    model.check_name(request.match_info["id"])
    return send_json(model.as_body())


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    model = request.app[BACKEND].model
    asked = await read_json(request, ChatRequest)
    model.check_name(asked.model)
    params, n = asked.sampling_params(), asked.num_answers
    ask = Ask((await model.engine.encode_chat(asked.messages),), params, n)
    form = ChatForm(_served(model), ask, FormOptions(include_usage=asked.include_usage))
    return await _send(request, ask, form, stream=bool(asked.stream))


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one text or several."""
    model = request.app[BACKEND].model
    asked = await read_json(request, CompletionRequest)
    model.check_name(asked.model)
    params, n = asked.sampling_params(), asked.num_answers
    prompts = [
        await model.engine.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in asked.prompts()
    ]
    ask = Ask(tuple(prompts), params, n)
    form = CompletionForm(_served(model), ask, FormOptions(include_usage=asked.include_usage))
    return await _send(request, ask, form, stream=bool(asked.stream))


async def _send(
    request: web.Request, ask: Ask, form: AnswerForm, *, stream: bool
) -> web.StreamResponse:
    steps = watched_answer(request, ask)
    if stream:
        return await send_stream(request, steps, form, EVENTS)
    async with aclosing(steps):
        return send_json(form.whole([step async for step in steps]))


def _served(model: OpenModel) -> Served:
    return Served(model.card.id, model.fingerprint, model.engine.tokenizer)
