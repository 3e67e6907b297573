"""Anthropic's routes: from a request to a generation job and the encoder of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from aiohttp import web

from thermocline.server.answers import PreparedAnswer, answers
from thermocline.server.anthropic.encoder import PING, MessageEncoder
from thermocline.server.anthropic.errors import error_body
from thermocline.server.anthropic.schema import CountRequest, MessagesRequest
from thermocline.server.core.exchange import operation, read_json, send_json, use_model
from thermocline.server.core.prompts import chat_job
from thermocline.server.core.sse import Framing, typed_frames

if TYPE_CHECKING:
    from thermocline.server.core.backend import OpenModel
    from thermocline.server.core.generation_jobs import GenerationJob

R = TypeVar("R", bound=CountRequest)

PATH: Final = "/v1/messages"
"""Prefix of this interface's paths; failures below it have its error bodies."""

_EVENTS: Final = Framing(
    error=lambda error: typed_frames([error_body(error)]), ping=typed_frames([PING])
)


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [web.post(PATH, messages), web.post(f"{PATH}/count_tokens", count_tokens)]


@answers(takes=MessagesRequest)
async def messages(request: web.Request) -> PreparedAnswer:
    """Answer a conversation."""
    model, body, job = await _read(request, MessagesRequest)
    encoder = MessageEncoder(model.card.id, len(job.prompts[0]))
    return PreparedAnswer(job, encoder, _EVENTS, bool(body.stream))


@operation(takes=CountRequest)
async def count_tokens(request: web.Request) -> web.Response:
    """Say how many tokens the prompt of a conversation has."""
    _, _, job = await _read(request, CountRequest)
    return send_json({"input_tokens": len(job.prompts[0])})


async def _read(request: web.Request, kind: type[R]) -> tuple[OpenModel, R, GenerationJob]:
    body = await read_json(request, kind)
    model = await use_model(request, body.model)
    return model, body, await chat_job(model.engine, body)
