"""Every architecture's answers against transformers' stored ones, on toy models rebuilt from their seeds."""

from __future__ import annotations

import pytest

from tests.support.arch_cases import ARCH_CASES, LONG_PROMPTS
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.golden_files import (
    ARCH_LOGITS,
    ARCH_TOKENS,
    LOGITS_ROWS,
    LONG_ROWS,
    check_covers,
    check_is_asked_model,
    read_golden,
    read_long_golden,
)
from tests.support.oracle_cases import ANSWER_TOKENS, LONGEST_PROMPT, prompt_ids
from tests.support.toy_archs import write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden():
    """The stored answers, by case."""
    return read_golden(ARCH_TOKENS, ARCH_LOGITS)


@pytest.fixture(scope="module", params=ARCH_CASES, ids=str)
def rebuilt(request, golden, tmp_path_factory):
    """A case's model, and what is expected of it."""
    case = request.param
    path = write_toy_arch(tmp_path_factory.mktemp("golden") / f"{case}.gguf", case.toy)
    expected, logits = golden[case.name]
    check_is_asked_model(path, expected)
    return path, expected["tokens"], logits


@pytest.mark.parametrize("kernels", ["native", "reference"])
async def test_logits_are_those_of_transformers(rebuilt, kernels):
    """The logits after chosen tokens of the prompt lie within the table's tolerance."""
    path, _, expected = rebuilt
    async with Engine.open(path, EngineConfig(kernels=kernels, memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, prompt_ids(LONGEST_PROMPT))
    assert_within(ours[list(LOGITS_ROWS)], expected, "transformers/F32")


async def test_the_greedy_answer_is_that_of_transformers(rebuilt):
    """Token for token the same answer."""
    path, expected, _ = rebuilt
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        assert await greedy_tokens(engine, prompt_ids(LONGEST_PROMPT), ANSWER_TOKENS) == expected


LONG_CASES = [case for case in ARCH_CASES if case.toy.arch in LONG_PROMPTS]


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
async def test_logits_of_a_longer_prompt_are_those_of_transformers(tmp_path, case):
    """Of architectures that keep something of more tokens than the other prompts have."""
    expected = read_long_golden(ARCH_LOGITS)[case.name]
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, prompt_ids(LONG_PROMPTS[case.toy.arch]))
    assert_within(ours[list(LONG_ROWS)], expected, "transformers/F32")


def test_the_files_cover_the_cases(golden):
    """Each case has an answer of full length, and there are no answers to cases that are gone."""
    check_covers(golden, ARCH_CASES)
    longer = read_long_golden(ARCH_LOGITS)
    assert sorted(longer) == sorted(case.name for case in LONG_CASES)
    assert {len(rows) for rows in longer.values()} == {len(LONG_ROWS)}
