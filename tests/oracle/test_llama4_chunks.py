"""Llama 4 behind its chunk of 8192 tokens, which llama.cpp takes for granted: transformers, llama.cpp and we agree there.

The rotary embedding turns one pair by whole numbers, and the other one hardly: float32 angles are exact then, in which
both oracles compute them.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

from tests.oracle.hf_archs import open_hf
from tests.oracle.llama_model import LlamaModel
from tests.support.compare import assert_within, nmse
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.oracle_cases import MIN_LEAD, prompt_ids
from tests.support.toy_archs import ToyArch, write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine

pytestmark = pytest.mark.oracle

CHUNK = 8192
LENGTH = CHUNK + 60
ANSWER_TOKENS = 24
TOY = ToyArch(
    "llama4",
    layers=4,
    hidden=32,
    heads=2,
    kv_heads=1,
    head_dim=4,
    experts=4,
    used=1,
    intermediate=16,
    dense=0,
    context=LENGTH,
    extra={"rope.freq_base": 1e12},
    seed=98,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_toy_arch(tmp_path_factory.mktemp("chunks") / "model.gguf", TOY)


async def test_logits_agree_on_both_sides_of_the_border(path, tmp_path):
    """Layers that turn forget the first chunk, and scores of the others grow; without a border it would be another text."""
    ids = prompt_ids(LENGTH)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
    near = slice(CHUNK - 60, LENGTH)
    assert_within(ours[near], open_hf(path).logits(ids)[near], "transformers/F32")
    with LlamaModel(path, LENGTH) as llama:
        assert_within(ours[near], llama.logits(ids)[near], "llama.cpp/F32")
    for name, value in (("sliding_window", 2 * CHUNK), ("temperature_length", 2 * CHUNK)):
        keys = {f"llama4.attention.{name}": value}
        other = write_toy_arch(tmp_path / f"{name}.gguf", TOY, metadata=keys)
        async with Engine.open(other, EngineConfig(memory=EXACT_CACHE)) as engine:
            without = await prompt_logits(engine, ids)
        assert np.array_equal(without[: CHUNK - 1], ours[: CHUNK - 1])
        assert nmse(without[CHUNK:], ours[CHUNK:]) > 1e-6, name


async def test_an_answer_crosses_the_border(path):
    """Decoded token by token, from the cache of the first chunk into the second one."""
    ids = prompt_ids(CHUNK - 10)
    expected, least_lead = open_hf(path).greedy(ids, ANSWER_TOKENS)
    assert least_lead > MIN_LEAD, "two tokens are too close to compare: give the case another seed"
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        assert await greedy_tokens(engine, ids, ANSWER_TOKENS) == expected
