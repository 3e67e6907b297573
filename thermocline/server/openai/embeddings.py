"""OpenAI's /v1/embeddings: texts or token ids to vectors. Knows no tensor and no scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from thermocline.errors import RequestError
from thermocline.server.answers import answers
from thermocline.server.core.exchange import read_json, send_json, use_model
from thermocline.server.core.gate import GATE
from thermocline.server.core.vectors import vectors_as_json

if TYPE_CHECKING:
    from aiohttp import web

    from thermocline.server.answers import PreparedAnswer

MAX_INPUTS: Final = 2048


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None

    def texts(self) -> list[str | list[int]]:
        """Return the inputs, as texts or as token ids. Raises RequestError."""
        if isinstance(self.input, str):
            return [self.input]
        ids = [item for item in self.input if isinstance(item, int)]
        if ids and len(ids) == len(self.input):
            return [ids]
        if ids:
            raise RequestError("input mixes token ids with inputs: send either", param="input")
        if not 1 <= len(self.input) <= MAX_INPUTS:
            raise RequestError(
                f"input is a list of {len(self.input)}: send 1 to {MAX_INPUTS} at a time",
                param="input",
            )
        return [item for item in self.input if not isinstance(item, int)]


class Embedding(msgspec.Struct):
    """One vector: numbers, or their little-endian float32 in base64."""

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(msgspec.Struct):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


@answers(takes=EmbeddingRequest, gives=EmbeddingBody)
async def embeddings(request: web.Request) -> PreparedAnswer | web.Response:
    """Embed one text or several."""
    body = await read_json(request, EmbeddingRequest)
    model = await use_model(request, body.model)
    if body.encoding_format not in (None, "float", "base64"):
        raise RequestError(
            f"encoding_format is {body.encoding_format!r}: use float or base64",
            param="encoding_format",
        )
    width = model.engine.spec.hidden_size
    if body.dimensions not in (None, width):
        raise RequestError(
            f"this model's embeddings have {width} numbers, and it was not trained for fewer: leave out dimensions",
            param="dimensions",
        )
    salt = request.app[GATE].cache_salt(request, None)
    found = await model.engine.embed(body.texts(), cache_salt=salt)
    num_tokens = sum(found.num_tokens)
    written: list[Any] = [
        *await vectors_as_json(
            found.vectors, model.engine.offload, packed=body.encoding_format == "base64"
        )
    ]
    data = [Embedding(vector, index) for index, vector in enumerate(written)]
    return send_json(EmbeddingBody(data, model.card.id, EmbeddingUsage(num_tokens, num_tokens)))
