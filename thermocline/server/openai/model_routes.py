"""Routes about the model and the server: models, version, properties and slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from thermocline import __version__
from thermocline.server.core.exchange import POOL, asked_name, send_json, shown_model

if TYPE_CHECKING:
    from thermocline.engine.api import Engine
    from thermocline.server.core.place import ModelState
    from thermocline.text.tokenizer import Tokenizer


def routes() -> list[web.RouteDef]:
    """Return these routes."""
    return [
        web.get("/v1/models", list_models),
        web.get("/models", list_models),
        web.get("/v1/models/{id:.+}", show_model),
        web.get("/version", version),
        web.get("/props", props),
        web.get("/slots", slots),
        web.get("/tokenizer_info", tokenizer_info),
    ]


async def list_models(request: web.Request) -> web.Response:
    """List the models that there are, in memory or not."""
    models = await request.app[POOL].models()
    return send_json({"object": "list", "data": [_model_body(model) for model in models]})


async def show_model(request: web.Request) -> web.Response:
    """Show one model."""
    name = asked_name(request, request.match_info["id"])
    return send_json(_model_body(await request.app[POOL].find(name)))


async def version(request: web.Request) -> web.Response:
    """Return the version of the server."""
    return send_json({"version": __version__})


async def props(request: web.Request) -> web.Response:
    """Return the properties that llama-server's clients read."""
    model = shown_model(request)
    engine, tokenizer = model.engine, model.engine.tokenizer
    return send_json(
        {
            "model_alias": model.card.id,
            "build_info": model.fingerprint,
            "total_slots": engine.max_requests,
            "chat_template": engine.template_source,
            "bos_token": _text(tokenizer, tokenizer.bos_id),
            "eos_token": _text(tokenizer, tokenizer.eos_id),
            "modalities": {"vision": False, "audio": False},
            "is_sleeping": False,
            "expert_workers": _workers(engine),
            "default_generation_settings": {"n_ctx": engine.max_context_tokens},
        }
    )


async def tokenizer_info(request: web.Request) -> web.Response:
    """Return the properties that vLLM's clients read before they use /tokenize."""
    engine = shown_model(request).engine
    tokenizer = engine.tokenizer
    return send_json(
        {
            "tokenizer_class": "thermocline",
            "bos_token": _text(tokenizer, tokenizer.bos_id) or None,
            "eos_token": _text(tokenizer, tokenizer.eos_id) or None,
            "chat_template": engine.template_source or None,
        }
    )


async def slots(request: web.Request) -> web.Response:
    """Return which of the slots for requests are taken."""
    engine = shown_model(request).engine
    snapshot = await engine.snapshot()
    num_taken = snapshot.num_running + snapshot.num_waiting
    return send_json(
        [
            {
                "id": number,
                "n_ctx": engine.max_context_tokens,
                "is_processing": number < num_taken,
                "is_waiting": snapshot.num_running <= number < num_taken,
            }
            for number in range(engine.max_requests)
        ]
    )


def _model_body(state: ModelState) -> dict[str, Any]:
    """Return OpenAI's model object; `status` is llama-server's, and `meta` is there while the model is in memory."""
    status = {"status": {"value": state.state}}
    if state.opened is not None:
        return state.opened.as_body() | status
    model = state.model
    return {
        "id": model.card.id,
        "object": "model",
        "created": int(model.modified_s),
        "owned_by": "thermocline",
    } | status


def _workers(engine: Engine) -> dict[str, object] | None:
    remote = engine.statistics().remote
    if remote is None:
        return None
    return {
        "on_failure": remote.on_failure,
        "experts": sum(remote.num_experts),
        "fallbacks": remote.total_fallbacks,
        "hedges": remote.total_hedges,
        "workers": [
            {
                "address": worker.worker,
                "state": worker.state,
                "kernels": worker.kernels,
                "transport": worker.transport,
                "failures": worker.total_failures,
                "last_error": worker.last_error or None,
            }
            for worker in remote.workers
        ],
    }


def _text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
