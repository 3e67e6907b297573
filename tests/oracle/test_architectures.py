"""Each architecture against transformers' own class of it, on small random models in float32."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.oracle.hf_archs import open_hf
from tests.support.arch_cases import ARCH_CASES, LONG_PROMPTS
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.oracle_cases import ANSWER_TOKENS, MIN_LEAD, prompt_ids
from tests.support.toy_archs import write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine

pytestmark = pytest.mark.oracle

PROMPT_LENGTHS = (1, 7, 63, 64, 65, 130)
"""One token, a prime, both sides of a chunk of 64 tokens, and more than two of them."""


@pytest.fixture(scope="module", params=ARCH_CASES, ids=str)
def opened(request, tmp_path_factory):
    """A case's file, its oracle, and lengths of its prompts."""
    folder = tmp_path_factory.mktemp("oracle")
    path = write_toy_arch(folder / f"{request.param}.gguf", request.param.toy)
    arch = request.param.toy.arch
    longer = (LONG_PROMPTS[arch],) if arch in LONG_PROMPTS else ()
    return path, open_hf(path), PROMPT_LENGTHS + longer


@pytest.mark.parametrize("kernels", ["native", "reference"])
async def test_logits_agree(opened, kernels):
    """The logits after every token of prompts of every length are transformers'."""
    path, oracle, lengths = opened
    async with Engine.open(path, EngineConfig(kernels=kernels, memory=EXACT_CACHE)) as engine:
        for length in lengths if kernels == "native" else lengths[:3]:
            ids = prompt_ids(length)
            assert_within(await prompt_logits(engine, ids), oracle.logits(ids), "transformers/F32")


@pytest.mark.parametrize("length", [1, 65])
async def test_greedy_answers_are_identical(opened, length):
    """Token for token the same answer, 64 tokens long."""
    path, oracle, _ = opened
    expected, least_lead = oracle.greedy(prompt_ids(length), ANSWER_TOKENS)
    assert least_lead > MIN_LEAD, "two tokens are too close to compare: give the case another seed"
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        assert await greedy_tokens(engine, prompt_ids(length), ANSWER_TOKENS) == expected
