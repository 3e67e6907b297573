"""Reranking: how well each of some documents answers a query, by a model whose head scores pairs.

Owns how a pair's final state becomes its score. Knows neither scheduler nor cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.engine.embedding import vectors_of
from thermocline.errors import PromptTooLongError, RequestError
from thermocline.messages import Pooling
from thermocline.text.rerank_prompt import require_prompt
from thermocline.workers.offload import is_bulk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.engine.api import Engine
    from thermocline.messages import FloatArray, RequestOptions
    from thermocline.text.rerank_prompt import RerankPrompt


@dataclass(frozen=True, slots=True)
class Ranking:
    """scores: of each document in the given order, 0 to 1. num_tokens: of each pair."""

    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]


async def rank_all(
    engine: Engine,
    prompt: RerankPrompt | None,
    head: FloatArray | None,
    query: str,
    documents: Sequence[str],
    options: RequestOptions,
) -> Ranking:
    """Return how well documents answer a query. See `Engine.rerank`. head: float32 [outputs, D]."""
    prompt = require_prompt(prompt)
    assert head is not None, "a file with the template of a reranker has its head"
    if not documents:
        raise RequestError(
            "there is nothing to score: give at least one document", param="documents"
        )
    pairs = [await _token_ids(engine, prompt, query, document) for document in documents]
    vectors = await vectors_of(engine, pairs, replace(options, pooling=Pooling.LAST))
    return Ranking(tuple(_score(head, vector) for vector in vectors), tuple(map(len, pairs)))


def _score(head: FloatArray, vector: FloatArray) -> float:
    """Return the first output's share of the softmax over all, of one final state [D]."""
    outputs = head.astype(np.float64) @ vector
    shares = np.exp(outputs - outputs.max())
    return float(shares[0] / shares.sum())


async def _token_ids(
    engine: Engine, prompt: RerankPrompt, query: str, document: str
) -> Sequence[int]:
    limit = engine.max_context_tokens
    encode = partial(prompt.encode, query, document, max_tokens=limit)
    try:
        token_ids = await engine.offload.run(
            lambda still_wanted: encode(on_slice=still_wanted), is_bulk=is_bulk(query + document)
        )
    except PromptTooLongError as error:
        found = error.num_prompt_tokens
        raise PromptTooLongError(found, limit, param="documents", is_least=True) from error
    if len(token_ids) > limit:
        raise PromptTooLongError(len(token_ids), limit, param="documents")
    return token_ids
