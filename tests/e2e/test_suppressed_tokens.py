"""Tokens that a model file takes out of every answer (`tokenizer.ggml.suppress_tokens`)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.toy_archs import ToyArch, write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine
from thermocline.sampling.params import SamplingParams

PROMPT = [5, 80, 33]
TOY = ToyArch("llama", biased=False, experts=0, used=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_never_has_them(tmp_path, temperature):
    """The likeliest token is left out: the next likeliest comes, greedily, and others when drawn."""
    config = EngineConfig(memory=EXACT_CACHE)
    async with Engine.open(write_toy_arch(tmp_path / "plain.gguf", TOY), config) as engine:
        row = (await prompt_logits(engine, PROMPT))[-1]
        assert await greedy_tokens(engine, PROMPT, 1) == [int(row.argmax())]
    order = np.argsort(-row)
    never = [int(n) for n in order[:20]]
    keys = {"tokenizer.ggml.suppress_tokens": never}
    path = write_toy_arch(tmp_path / "m.gguf", TOY, metadata=keys)
    async with Engine.open(path, config) as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=3)
        tokens = [n async for event in engine.generate(PROMPT, params) for n in event.token_ids]
        logits = (await prompt_logits(engine, PROMPT))[-1]
    assert len(tokens) == 40
    assert not set(tokens) & set(never)
    assert np.array_equal(logits, row), "logits that are asked for are the model's"
    if temperature == 0:
        assert tokens[0] == order[20]
