"""The Responses route: from a request to a generation job and the encoder of its answer."""

from __future__ import annotations

import time

from aiohttp import web

from thermocline.server.answers import PreparedAnswer, answers
from thermocline.server.core.exchange import read_json, use_model
from thermocline.server.core.prompts import chat_job
from thermocline.server.core.sse import Framing
from thermocline.server.responses.encoder import ResponseEncoder
from thermocline.server.responses.schema import ResponsesRequest


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [web.post("/v1/responses", create_response)]


@answers(takes=ResponsesRequest)
async def create_response(request: web.Request) -> PreparedAnswer:
    """Answer a conversation."""
    body = await read_json(request, ResponsesRequest)
    model = await use_model(request, body.model)
    job = await chat_job(model.engine, body)
    encoder = ResponseEncoder(body, model.card.id, int(time.time()))
    return PreparedAnswer(job, encoder, Framing(error=encoder.failure), bool(body.stream))
