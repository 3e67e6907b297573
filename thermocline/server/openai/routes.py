"""OpenAI's routes: from a request to a generation job and the encoder of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from thermocline.server.answers import PreparedAnswer, answers
from thermocline.server.core.exchange import CONFIG, read_with_unknown, use_model
from thermocline.server.openai import embeddings, model_routes, rerank, slot_routes, tokens
from thermocline.server.openai.bodies import ChatBody, CompletionBody
from thermocline.server.openai.encoder import EVENTS
from thermocline.server.openai.fields import GenerationRequest
from thermocline.server.openai.jobs import ResponseOptions, prepare_chat, prepare_completion
from thermocline.server.openai.schema import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from thermocline.server.core.backend import OpenModel
    from thermocline.server.core.generation_jobs import GenerationJob
    from thermocline.server.openai.encoder import OpenAIEncoder

R = TypeVar("R", bound=GenerationRequest)


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        *model_routes.routes(),
        *tokens.routes(),
        *slot_routes.routes(),
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
        web.post("/v1/embeddings", embeddings.embeddings),
        *(web.post(path, rerank.rerank) for path in rerank.PATHS),
    ]


@answers(takes=ChatCompletionRequest, gives=ChatBody)
async def chat_completions(request: web.Request) -> PreparedAnswer:
    """Answer a conversation."""
    model, body, options = await _read(request, ChatCompletionRequest)
    return _prepared(body, *await prepare_chat(model, body, options))


@answers(takes=CompletionRequest, gives=CompletionBody)
async def completions(request: web.Request) -> PreparedAnswer:
    """Continue one text or several."""
    model, body, options = await _read(request, CompletionRequest)
    return _prepared(body, *await prepare_completion(model, body, options))


async def _read(request: web.Request, kind: type[R]) -> tuple[OpenModel, R, ResponseOptions]:
    body, unknown = await read_with_unknown(request, kind)
    model = await use_model(request, body.model)
    return model, body, ResponseOptions.of(request.app[CONFIG], model.engine, unknown)


def _prepared(
    body: GenerationRequest, job: GenerationJob, encoder: OpenAIEncoder
) -> PreparedAnswer:
    return PreparedAnswer(job, encoder, EVENTS, bool(body.stream), body.ping_after_s)
