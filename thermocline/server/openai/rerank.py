"""Reranking: /v1/rerank as Jina and llama-server have it, and the form of text-embeddings-inference (`texts`).

Knows no tensor and no scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from thermocline.errors import RequestError
from thermocline.server.answers import answers
from thermocline.server.core.exchange import read_json, send_json, use_model
from thermocline.server.core.gate import GATE

if TYPE_CHECKING:
    from aiohttp import web

    from thermocline.engine.reranking import Ranking
    from thermocline.server.answers import PreparedAnswer

MAX_DOCUMENTS: Final = 2048
PATHS: Final = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")


class RerankRequest(msgspec.Struct, kw_only=True):
    """The body: documents, or texts for an answer in the other form."""

    query: str
    documents: list[str] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    return_text: bool = False
    user: str | None = None

    def given(self) -> list[str]:
        """Return the documents. Raises RequestError."""
        if self.documents is not None and self.texts is not None:
            raise RequestError(
                "documents and texts are two names of one: send either", param="texts"
            )
        name, found = ("documents", self.documents) if self.texts is None else ("texts", self.texts)
        if not found:
            raise RequestError(f"{name} is empty: send at least one text", param=name)
        if len(found) > MAX_DOCUMENTS:
            raise RequestError(
                f"{name} is a list of {len(found)}: send 1 to {MAX_DOCUMENTS} at a time", param=name
            )
        return found


class Document(msgspec.Struct):
    """A document as it was sent."""

    text: str


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """A document's place in the list that was sent, and its score from 0 to 1."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankUsage(msgspec.Struct):
    """Tokens of all pairs."""

    prompt_tokens: int
    total_tokens: int


class RerankBody(msgspec.Struct):
    """The answer, the best document first."""

    model: str
    usage: RerankUsage
    results: list[RankedDocument]
    object: str = "list"


class RankedText(msgspec.Struct, omit_defaults=True):
    """The same in the form of text-embeddings-inference, whose answer is a list of these."""

    index: int
    score: float
    text: str | None = None


@answers(takes=RerankRequest, gives=RerankBody)
async def rerank(request: web.Request) -> PreparedAnswer | web.Response:
    """Score documents against a query, the best first."""
    body = await read_json(request, RerankRequest)
    model = await use_model(request, body.model)
    documents = body.given()
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n is {body.top_n}; it must be at least 1", param="top_n")
    salt = request.app[GATE].cache_salt(request, None)
    found = await model.engine.rerank(body.query, documents, cache_salt=salt)
    order = _order(found)[: body.top_n]
    if body.texts is not None:
        return send_json(
            [
                RankedText(n, found.scores[n], documents[n] if body.return_text else None)
                for n in order
            ]
        )
    ranked = [
        RankedDocument(
            n, found.scores[n], Document(documents[n]) if body.return_documents else None
        )
        for n in order
    ]
    num_tokens = sum(found.num_tokens)
    return send_json(RerankBody(model.card.id, RerankUsage(num_tokens, num_tokens), ranked))


def _order(found: Ranking) -> list[int]:
    """Return the documents' indices, the best first, and the first among equals."""
    return sorted(range(len(found.scores)), key=lambda n: -found.scores[n])
