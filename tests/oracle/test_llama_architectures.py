"""Each architecture against llama.cpp on the same file: float32 logits, and perplexity of quantised weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_model import LlamaModel, llama_perplexity
from tests.support.arch_cases import LLAMA_CASES, SCHEDULED_CASES
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, prompt_logits
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine import Engine
from thermocline.sampling.params import SamplingParams
from thermocline.scoring import perplexity

pytestmark = pytest.mark.oracle

MAX_RELATIVE_DIFFERENCE = 0.005
TEXTS = 20


@pytest.mark.parametrize("case", LLAMA_CASES, ids=str)
async def test_logits_agree_in_float32(tmp_path, case):
    """llama.cpp gives our logits on the same file, for prompts around a chunk's length."""
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        with LlamaModel(path) as llama:
            for length in (1, 7, 65, 130):
                ids = prompt_ids(length)
                ours = await prompt_logits(engine, ids)
                assert_within(ours, llama.logits(ids), "llama.cpp/F32")


# Where every expert is chosen, a rounded activation can not change the choice, which is a jump.
ALL_CHOSEN = [
    replace(case, toy=replace(case.toy, experts=4, used=4, context=128)) for case in SCHEDULED_CASES
]


@pytest.mark.parametrize("case", ALL_CHOSEN, ids=str)
async def test_perplexity_agrees_on_quantised_weights(tmp_path, case):
    """The perplexity of texts that the model finds likely differs by at most half a percent.

    It wrote them itself: a text of random tokens is so unlikely that rounded activations alone move it.
    """
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    text: list[int] = []
    async with Engine.open(path) as engine:
        for seed in range(TEXTS):
            params = SamplingParams(max_tokens=95, ignore_eos=True, temperature=0.2, seed=seed)
            text.append(seed)
            async for event in engine.generate([seed], params):
                text += event.token_ids
        ours = await perplexity(engine, text, 96)
    with LlamaModel(path) as llama:
        theirs = llama_perplexity(llama, text, 96)
    assert abs(ours.perplexity / theirs - 1) <= MAX_RELATIVE_DIFFERENCE, (ours, theirs)
