"""Ollama's /api/embed, and the older /api/embeddings. Knows no tensor and no scheduler."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from thermocline.engine.embedding import Embeddings, normalized
from thermocline.errors import RequestError
from thermocline.server.answers import answers
from thermocline.server.core.exchange import MODEL, read_json, send_json, use_model
from thermocline.server.core.gate import GATE
from thermocline.server.core.vectors import vectors_as_json
from thermocline.server.ollama.schema import NamedModel

if TYPE_CHECKING:
    from aiohttp import web

    from thermocline.server.answers import PreparedAnswer

_MAX_INPUTS = 2048


class EmbedRequest(NamedModel, kw_only=True):
    """The body of POST /api/embed."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None

    def texts(self) -> list[str]:
        """Return the inputs; none of an empty one asks to load the model. Raises RequestError."""
        texts = [self.input] if isinstance(self.input, str) else self.input or []
        if len(texts) > _MAX_INPUTS:
            raise RequestError(
                f"input is a list of {len(texts)}: send at most {_MAX_INPUTS} at a time",
                param="input",
            )
        return [] if texts == [""] else texts


class OldEmbedRequest(NamedModel, kw_only=True):
    """The body of POST /api/embeddings."""

    prompt: str | None = None


@answers(takes=EmbedRequest)
async def embed(request: web.Request) -> PreparedAnswer | web.Response:
    """Embed one text or several."""
    body = await read_json(request, EmbedRequest, any_type=True)
    start_s = time.perf_counter()
    model = await use_model(request, body.model_name, keep_alive_s=body.keep_alive_s)
    loaded_s = time.perf_counter()
    if body.dimensions is not None and body.dimensions < 0:
        raise RequestError(
            f"dimensions is {body.dimensions}: send at least 1, or leave it out", param="dimensions"
        )
    found = await _embed(request, body.texts(), truncate=body.truncate is not False)
    vectors = found.vectors
    if body.dimensions and body.dimensions < vectors.shape[1]:
        vectors = normalized(vectors[:, : body.dimensions])
    took_ns = int((time.perf_counter() - start_s) * 1e9)
    return send_json(
        {
            "model": body.model,
            "embeddings": await vectors_as_json(vectors, model.engine.offload),
            "total_duration": took_ns,
            "load_duration": int((loaded_s - start_s) * 1e9),
            "prompt_eval_count": sum(found.num_tokens),
        }
    )


@answers(takes=OldEmbedRequest)
async def embeddings(request: web.Request) -> PreparedAnswer | web.Response:
    """Embed one text, as older clients ask for it."""
    body = await read_json(request, OldEmbedRequest, any_type=True)
    model = await use_model(request, body.model_name, keep_alive_s=body.keep_alive_s)
    found = await _embed(request, [body.prompt] if body.prompt else [], truncate=True)
    vectors = await vectors_as_json(found.vectors, model.engine.offload)
    return send_json({"embedding": vectors[0] if body.prompt else []})


async def _embed(request: web.Request, texts: list[str], *, truncate: bool) -> Embeddings:
    engine = request[MODEL].engine
    if not texts:
        return Embeddings(np.empty((0, engine.spec.hidden_size), np.float32), ())
    salt = request.app[GATE].cache_salt(request, None)
    return await engine.embed(texts, truncate=truncate, cache_salt=salt)
