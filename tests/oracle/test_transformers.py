"""Logits and greedy answers against transformers' model of the architecture, on shapes that hurt."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from scripts.demo_model.export import replace_block
from tests.oracle.hf_model import open_qwen3moe
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.oracle_cases import (
    ALL_CASES,
    ANSWER_TOKENS,
    BLOCK_CASES,
    FLOAT_CASES,
    HALF_CASES,
    LONGEST_PROMPT,
    MIN_LEAD,
    PROMPT_LENGTHS,
    prompt_ids,
    write_case,
)
from thermocline.config import EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH
from thermocline.engine.api import Engine

pytestmark = pytest.mark.oracle

# Native kernels round the activations of quantised products; test_golden_logits.py has those.
EXACT_RUNS = [(case, "reference") for case in ALL_CASES] + [
    (case, "native") for case in ALL_CASES if case.exact_kernels == "native"
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return a function from a case to its file and oracle, made once each."""
    folder = tmp_path_factory.mktemp("oracle")
    made = {}

    def open_case(case):
        if case.name not in made:
            path = write_case(folder / f"{case.name}.gguf", case)
            made[case.name] = (path, open_qwen3moe(path))
        return made[case.name]

    return open_case


@pytest.mark.parametrize(("case", "kernels"), EXACT_RUNS, ids=str)
async def test_logits_agree(opened, case, kernels):
    """The logits after every token of prompts of every length are transformers'."""
    path, oracle = opened(case)
    async with Engine.open(path, EngineConfig(kernels=kernels, memory=EXACT_CACHE)) as engine:
        for length in PROMPT_LENGTHS:
            ids = prompt_ids(length)
            ours = await prompt_logits(engine, ids)
            assert_within(ours, oracle.logits(ids), f"transformers/{case.format}")


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
async def test_greedy_answers_are_identical(opened, case, length):
    """Token for token the same answer from float32 weights, after prompts of every length."""
    await _same_answer(*opened(case), length, "native")


@pytest.mark.parametrize("case", HALF_CASES + BLOCK_CASES, ids=str)
async def test_greedy_answers_from_rounded_weights_are_identical(opened, case):
    """Token for token the same answer from every other weight format."""
    await _same_answer(*opened(case), LONGEST_PROMPT, case.exact_kernels)


@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
async def test_greedy_answers_of_the_reference_are_identical(opened, case):
    """The NumPy kernels give transformers' answer too."""
    await _same_answer(*opened(case), 1, "reference")


async def _same_answer(path, oracle, length, kernels):
    expected, least_lead = oracle.greedy(prompt_ids(length), ANSWER_TOKENS)
    assert least_lead > MIN_LEAD, "two tokens are too close to compare: give the case another seed"
    async with Engine.open(path, EngineConfig(kernels=kernels, memory=EXACT_CACHE)) as engine:
        assert await greedy_tokens(engine, prompt_ids(length), ANSWER_TOKENS) == expected


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 256])
@pytest.mark.parametrize("hot_fraction", [0.0, 0.5, 1.0])
async def test_neither_chunks_nor_the_split_matter(opened, chunk_tokens, hot_fraction):
    """A prompt of several chunks, with experts on either side of the split, gives the same logits."""
    case = FLOAT_CASES[0]
    path, oracle = opened(case)
    config = EngineConfig(
        memory=EXACT_CACHE,
        scheduler=SchedulerConfig(prefill_chunk_tokens=chunk_tokens),
        placement=PlacementConfig(hot_device="cpu", hot_fraction=hot_fraction),
    )
    ids = prompt_ids(300)
    async with Engine.open(path, config) as engine:
        ours = await prompt_logits(engine, ids)
    assert_within(ours, oracle.logits(ids), f"transformers/{case.format}")


async def test_the_demo_model_agrees(tmp_path):
    """The packaged model gives transformers' logits and answer, token for token, on prose."""
    oracle = open_qwen3moe(replace_block(DEMO_MODEL_PATH, tmp_path / "layers.gguf", None))
    async with Engine.open(
        DEMO_MODEL_PATH, EngineConfig(kernels="reference", memory=EXACT_CACHE)
    ) as engine:
        text = DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8")
        ids = (await engine.encode(text, parse_special=False))[:256]
        assert_within(await prompt_logits(engine, ids), oracle.logits(ids), "transformers/mixed")
        expected, least_lead = oracle.greedy(ids[:40], ANSWER_TOKENS)
        assert least_lead > MIN_LEAD
        assert await greedy_tokens(engine, ids[:40], ANSWER_TOKENS) == expected


async def test_lonely_experts_are_lonely(opened):
    """The case that is to leave experts without a token does so in every layer."""
    case = next(case for case in FLOAT_CASES if case.name == "lonely_experts")
    async with Engine.open(opened(case)[0]) as engine:
        await prompt_logits(engine, prompt_ids(LONGEST_PROMPT))
        heat = engine.statistics().heat
    assert heat.sum() == case.shape.layers * LONGEST_PROMPT
    assert (heat == 0).any(axis=1).all()
