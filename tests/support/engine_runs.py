"""Runs an engine to the end of a question, for tests: the answer's tokens, or the prompt's logits; in which schedules."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import numpy as np

from thermocline.config import MemoryConfig
from thermocline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thermocline.engine.api import Engine


# Oracles hold keys and values in float32; the default rounds them to halves.
EXACT_CACHE = MemoryConfig(kv_type="f32")


async def greedy_tokens(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` most likely next tokens, one after the other; end tokens do not end it."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    tokens: list[int] = []
    async for event in engine.generate(prompt, params):
        tokens.extend(event.token_ids)
    return tokens


async def prompt_logits(engine: Engine, token_ids: Sequence[int]) -> np.ndarray:
    """Return the logits after every token: float32 [tokens, vocabulary]."""
    parts = [part async for part in engine.score(token_ids)]
    assert [part.start for part in parts] == list(
        np.cumsum([0, *(len(part.logits) for part in parts[:-1])])
    ), "chunks of logits are not in order"
    return np.concatenate([part.logits for part in parts])


def schedules(
    hot_shares: Sequence[float], chunks: Sequence[int]
) -> Iterator[tuple[float, int, bool]]:
    """Yield a hot share, a chunk size, and whether a trace is written: each two of them together, once.

    With THERMOCLINE_SCHEDULES, which `make schedules` sets, each three of them.
    """
    for (i, hot), (j, chunk) in itertools.product(enumerate(hot_shares), enumerate(chunks)):
        both = "THERMOCLINE_SCHEDULES" in os.environ
        for trace in (False, True) if both else ((i + j) % 2 == 1,):
            yield hot, chunk, trace
