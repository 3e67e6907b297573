"""Embeddings: one vector of each text, made of the hidden states that the model's head would see.

Owns how the texts of one call run side by side. Knows neither scheduler nor cache.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import EngineError, PromptTooLongError, RequestError
from thermocline.messages import Pooling, PromptEmbedding, RequestOptions
from thermocline.sampling.params import SamplingParams
from thermocline.text.prompt_ids import checked_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.engine.api import Engine
    from thermocline.messages import FloatArray

# Further texts wait here instead of in the engine's queue, so that other requests find room in it.
_MAX_CONCURRENT: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """vectors: float32 [texts, D]. num_tokens: of each text, as it was embedded."""

    vectors: FloatArray
    num_tokens: tuple[int, ...]


async def embed_all(
    engine: Engine,
    texts: Sequence[str | Sequence[int]],
    *,
    normalize: bool,
    truncate: bool,
    options: RequestOptions,
) -> Embeddings:
    """Return the embeddings of texts, or of token ids. See `Engine.embed`."""
    pooling = engine.spec.pooling
    if pooling is Pooling.RANK:
        raise RequestError(
            "this model scores how well two texts fit, and makes no embeddings: use /v1/rerank, or a model that does",
            param="model",
        )
    if not len(texts):
        raise RequestError("there is nothing to embed: give at least one text", param="input")
    prompts = [await _token_ids(engine, text, truncate=truncate) for text in texts]
    vectors = await vectors_of(engine, prompts, replace(options, pooling=pooling))
    if normalize:
        vectors = normalized(vectors)
    return Embeddings(vectors, tuple(map(len, prompts)))


async def vectors_of(
    engine: Engine, prompts: Sequence[Sequence[int]], options: RequestOptions
) -> FloatArray:
    """Return a vector of each prompt, float32 [prompts, D], pooled as the options say; some are computed side by side."""
    places = asyncio.Semaphore(min(_MAX_CONCURRENT, engine.max_requests))

    async def one(token_ids: Sequence[int]) -> FloatArray:
        async with places:
            return await _vector(engine, token_ids, options)

    tasks = [asyncio.create_task(one(token_ids), name="embed") for token_ids in prompts]
    try:
        return np.stack(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def normalized(vectors: FloatArray) -> FloatArray:
    """Return the vectors [n, D] with length 1; a vector of zeros stays."""
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    return (vectors / np.where(lengths, lengths, 1.0)).astype(np.float32)


async def _token_ids(engine: Engine, text: str | Sequence[int], *, truncate: bool) -> Sequence[int]:
    limit = engine.max_context_tokens
    try:
        token_ids = (
            await engine.encode(text, max_tokens=limit, truncate=truncate)
            if isinstance(text, str)
            else text
        )
    except PromptTooLongError as error:
        found = error.num_prompt_tokens
        raise PromptTooLongError(found, limit, param="input", is_least=True) from error
    if not len(token_ids) or text == "":
        raise RequestError(
            "a text to embed is empty: leave it out, or give it at least one token", param="input"
        )
    if len(token_ids) > limit and not truncate:
        raise PromptTooLongError(len(token_ids), limit, param="input")
    kept = token_ids[:limit]
    try:
        return checked_prompt(kept, engine.tokenizer.vocab_size, limit)
    except RequestError as error:
        raise RequestError(str(error), param="input") from error


async def _vector(engine: Engine, token_ids: Sequence[int], options: RequestOptions) -> FloatArray:
    vector: FloatArray | None = None
    events = engine.events(token_ids, SamplingParams(max_tokens=0), options)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, PromptEmbedding):
                vector = event.vector
    if vector is None:
        raise EngineError("a text ended without its embedding: send it again")
    return vector
