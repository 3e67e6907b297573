"""Files as users get them: transformers' models through llama.cpp's converter and quantiser.

Float32 files must answer as transformers does. In quantised files each side rounds activations in its own way, and a
random router chooses otherwise where two experts are nearly tied: so the middle position's error is compared, against
exact arithmetic on what the file's weights decode to.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

from tests.oracle.decoded import decoded_weights
from tests.oracle.llama_model import LlamaModel, llama_perplexity
from tests.oracle.toolchain.quantise import quantise
from tests.oracle.toolchain.workshop import (
    MIXED_CASES,
    MIXES,
    OTHER_CASES,
    SMALL_CASES,
    Workshop,
    open_exact,
    position_errors,
)
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.oracle_cases import ANSWER_TOKENS, MIN_LEAD, prompt_ids
from thermocline.config import EngineConfig
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.engine import Engine
from thermocline.sampling.params import SamplingParams
from thermocline.scoring import perplexity

pytestmark = pytest.mark.oracle

PROMPT_TOKENS = 65
MIXED_PROMPT_TOKENS = 130
MAX_TIMES_LLAMA = 3.0
# Where every product is exact on both sides, errors are noise and their ratio is, too.
NOISE = 1e-10
MAX_RELATIVE_DIFFERENCE = 0.005
NUM_TEXTS, TEXT_TOKENS = 16, 128


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Files, made once each."""
    return Workshop(tmp_path_factory.mktemp("toolchain"))


@pytest.mark.parametrize("case", SMALL_CASES + OTHER_CASES, ids=str)
async def test_a_converted_file_answers_as_transformers(workshop, case):
    """Logits and 64 greedy tokens of the model that was converted."""
    oracle, path = workshop.converted(case)
    ids = prompt_ids(PROMPT_TOKENS)
    expected, least_lead = oracle.greedy(ids, ANSWER_TOKENS)
    assert least_lead > MIN_LEAD, "two tokens are too close to compare: give the case another seed"
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        assert_within(await prompt_logits(engine, ids), oracle.logits(ids), "transformers/F32")
        assert await greedy_tokens(engine, ids, ANSWER_TOKENS) == expected


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("case", MIXED_CASES, ids=str)
async def test_a_quantised_file_is_as_near_as_in_llama_cpp(workshop, case, mix):
    """The middle position's error is at most three times llama.cpp's own on the same file."""
    path = workshop.quantised(case, mix)
    ids = prompt_ids(MIXED_PROMPT_TOKENS)
    exact = open_exact(path).logits(ids)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = np.median(position_errors(await prompt_logits(engine, ids), exact))
    with LlamaModel(path) as llama:
        theirs = np.median(position_errors(llama.logits(ids), exact))
    print(f"{case} {mix}: ours {ours:.2e}, llama.cpp {theirs:.2e}")  # noqa: T201 - shown by -s
    assert ours <= max(MAX_TIMES_LLAMA * theirs, NOISE), (ours, theirs)


@pytest.fixture(scope="module")
def likely_text():
    """Texts that the packaged model wrote itself: what it finds unlikely would be moved by rounding alone."""

    async def write() -> list[int]:
        tokens: list[int] = []
        async with Engine.open(DEMO_MODEL_PATH) as engine:
            for seed in range(NUM_TEXTS):
                params = SamplingParams(
                    max_tokens=TEXT_TOKENS - 1, ignore_eos=True, temperature=0.7, seed=seed
                )
                tokens.append(seed)
                async for event in engine.generate([seed], params):
                    tokens += event.token_ids
        return tokens

    return asyncio.run(write())


@pytest.mark.parametrize("mix", MIXES)
async def test_perplexity_of_a_trained_model_agrees(tmp_path, likely_text, mix):
    """The packaged model, quantised anew: llama.cpp's perplexity of the same texts, within half a percent."""
    path = quantise(DEMO_MODEL_PATH, tmp_path / "demo.gguf", mix)
    async with Engine.open(path) as engine:
        ours = await perplexity(engine, likely_text, TEXT_TOKENS)
    with LlamaModel(path) as llama:
        theirs = llama_perplexity(llama, likely_text, TEXT_TOKENS)
    print(f"{mix}: ours {ours.perplexity:.4f}, llama.cpp {theirs:.4f}")  # noqa: T201 - shown by -s
    assert abs(ours.perplexity / theirs - 1) <= MAX_RELATIVE_DIFFERENCE, (ours, theirs)


def test_an_extra_block_is_written(workshop):
    """The cases with a block that guesses tokens have one in their files: else they would prove nothing."""
    for case in OTHER_CASES:
        if case.tiny.extra_block:
            names = decoded_weights(workshop.converted(case)[1])
            assert "blk.2.nextn.eh_proj.weight" in names
