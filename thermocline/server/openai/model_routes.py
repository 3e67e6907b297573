"""Routes about the model and the server: models, version, properties and slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from thermocline import __version__
from thermocline.server.core.exchange import BACKEND, check_model, send_json

if TYPE_CHECKING:
    from thermocline.engine.api import Engine
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
    """List the one model."""
    return send_json({"object": "list", "data": [request.app[BACKEND].model.as_body()]})


async def show_model(request: web.Request) -> web.Response:
    """Show one model."""
    check_model(request, request.match_info["id"])
    return send_json(request.app[BACKEND].model.as_body())


async def version(request: web.Request) -> web.Response:
    """Return the version of the server."""
    return send_json({"version": __version__})


async def props(request: web.Request) -> web.Response:
    """Return the properties that llama-server's clients read."""
    model = request.app[BACKEND].model
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
    engine = request.app[BACKEND].model.engine
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
    engine = request.app[BACKEND].model.engine
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
