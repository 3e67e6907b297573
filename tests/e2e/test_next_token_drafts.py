"""A file's own block drafts: answers stay the same to the bit, and a trained block is mostly right."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.e2e.test_speculation import (
    TIMES,
    answers_with,
    answers_without,
    random_config,
    random_request,
)
from tests.support.same_events import are_same
from tests.support.settled import settled
from tests.support.toy_archs import toy_arch_weights, write_toy_arch
from tests.support.toy_next_block import (
    DRAFTING_TOYS,
    next_block_metadata,
    next_block_weights,
    write_drafting_toy,
)
from thermocline import Engine, EngineConfig, SamplingParams, SpeculationConfig
from thermocline.config import CpuConfig, TraceConfig
from thermocline.demo import DEMO_MODEL_PATH, DEMO_QUESTIONS
from thermocline.errors import ConfigError, RequestError, UnsupportedModelError
from thermocline.messages import RequestOptions
from thermocline.modelfile.reader import ModelFile
from thermocline.models import next_token_block
from thermocline.speculation import chains, head_rows
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane, Name

NUM_REQUESTS = 6 * TIMES
GREEDY = SamplingParams(max_tokens=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTING_TOYS)
def test_no_draft_of_a_block_changes_an_answer(tmp_path, monkeypatch, name):
    """Of random blocks, whose every guess is verified: under random schedules, as one row a step answers."""
    monkeypatch.setattr(chains, "MIN_CONFIDENCE", 0.0)
    path = write_drafting_toy(tmp_path / "m.gguf", DRAFTING_TOYS[name])
    chance = random.Random(name)
    requests = [random_request(chance) for _ in range(NUM_REQUESTS)]
    expected = asyncio.run(answers_without(path, requests))
    mine = [
        replace(one, options=replace(one.options, speculate=("mtp",)), rounds=chance.randrange(20))
        for one in requests
    ]
    num_drafted = 0
    for first in range(0, len(mine), 3):
        config = random_config(chance)
        fixed = config.speculation.fixed_tokens or 4
        config = replace(config, speculation=replace(config.speculation, fixed_tokens=fixed))
        batch = slice(first, first + 3)
        answers = asyncio.run(answers_with(path, config, mine[batch]))
        for answer, alone in zip(answers, expected[batch], strict=True):
            assert are_same(answer.events, alone.events), config
        num_drafted += sum(answer.num_drafted for answer in answers)
    assert num_drafted, "nothing was drafted, which tests nothing"


def demo_config(drafters, fixed=None):
    """One thread, which is as exact as many."""
    return EngineConfig(
        speculation=SpeculationConfig(drafters=drafters, fixed_tokens=fixed),
        cpu=CpuConfig(threads=1),
    )


async def demo_answers(config, questions):
    """What the demo model answers, and its figures, question by question."""
    found = []
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        for question in questions:
            prompt = await engine.encode_chat([{"role": "user", "content": question}])
            tokens = []
            async for event in engine.generate(prompt, GREEDY):
                tokens += event.token_ids
                timings = event.timings
            found.append((tokens, timings))
    return found


@pytest.mark.slow
async def test_a_trained_block_is_mostly_right():
    """The demo model's: three of four drafted tokens are what the model says, and the text is the same."""
    questions = DEMO_QUESTIONS[:6]
    plain = await demo_answers(demo_config("off"), questions)
    drafted = await demo_answers(demo_config("mtp", 3), questions)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    figures = [timings.drafts for _, timings in drafted]
    num_drafted = sum(each.num_drafted for each in figures)
    num_accepted = sum(each.num_accepted for each in figures)
    assert num_drafted > 60
    assert num_accepted > 0.75 * num_drafted
    assert not any(timings.drafts.num_drafted for _, timings in plain)


@pytest.mark.slow
async def test_drafts_from_a_part_of_the_vocabulary_change_no_answer(monkeypatch):
    """The demo model's, whose head is cut for the test: fewer tokens can be drafted, and some of them are right."""
    questions = DEMO_QUESTIONS[:4]
    plain = await demo_answers(demo_config("off"), questions)
    whole = await demo_answers(demo_config("mtp", 3), questions)
    monkeypatch.setattr(next_token_block, "_LEAST_CUT_TOKENS", 0)
    monkeypatch.setattr(head_rows, "_LEAST_SHARES", (0.1, 0.1))
    part = await demo_answers(demo_config("mtp", 3), questions)
    assert [tokens for tokens, _ in part] == [tokens for tokens, _ in plain]
    in_all, in_part = (
        sum(each.drafts.num_accepted for _, each in found) for found in (whole, part)
    )
    assert 0 < in_part < in_all


@pytest.mark.slow
async def test_a_found_prefix_is_drafted_behind():
    """A second chat that begins like the first finds its blocks computed, the drafter's keys and values among them."""
    first, second = [[], []], [[], []]
    async with Engine.open(DEMO_MODEL_PATH, demo_config("mtp", 3)) as engine:
        question = {"role": "user", "content": DEMO_QUESTIONS[4]}
        prompt = await engine.encode_chat([question])
        for found in (first, second):
            async for event in engine.generate(prompt, GREEDY):
                found[0] += event.token_ids
                found[1] = event.timings
    assert first[0] == second[0]
    assert second[1].num_cached_tokens >= 16
    assert second[1].drafts.num_accepted >= 0.75 * second[1].drafts.num_drafted > 0
    assert second[1].drafts.num_accepted == first[1].drafts.num_accepted


@pytest.mark.slow
async def test_the_timeline_shows_drafting():
    """On the CPU's threads, with the head of a prompt's chunk too, and which steps verified."""
    config = replace(demo_config("mtp", 2), trace=TraceConfig(enabled=True))
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        prompt = await engine.encode_chat([{"role": "user", "content": DEMO_QUESTIONS[0]}])
        async for event in engine.generate(prompt, GREEDY):
            timings = event.timings
        await settled(engine)
        events = engine.trace_events()
    spans = [event for event in events if isinstance(event, SpanEvent)]
    drafting = [span for span in spans if span.name is Name.DRAFT and span.lane is Lane.CPU]
    chunks = {span.args["tokens"] for span in drafting}
    assert len(prompt) in chunks, "the prompt runs through the block"
    assert len(chunks) > 1, "so do steps"
    verified = [span for span in spans if span.name is Name.VERIFY]
    assert sum(span.args["accepted"] for span in verified) == timings.drafts.num_accepted > 0


@pytest.mark.parametrize(("drafters", "reads"), [("off", False), ("lookup", False), ("auto", True)])
async def test_a_block_is_read_where_it_may_draft(tmp_path, monkeypatch, drafters, reads):
    """With speculation off, or by others alone, nobody looks at its tensors."""
    seen: set[str] = set()
    view = ModelFile.view
    monkeypatch.setattr(ModelFile, "view", lambda self, name: seen.add(name) or view(self, name))
    toy = DRAFTING_TOYS["qwen35moe"]
    path = write_drafting_toy(tmp_path / "m.gguf", toy)
    async with Engine.open(path, demo_config(drafters)) as engine:
        async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=2)):
            pass
    assert any(name.startswith(f"blk.{toy.layers}.") for name in seen) == reads


async def test_whoever_asks_for_a_block_that_is_not_there_is_told(tmp_path):
    """At open, and in a request; by itself a model with a broken block runs without it."""
    toy = DRAFTING_TOYS["qwen35moe"]
    plain = write_toy_arch(tmp_path / "plain.gguf", toy)
    with pytest.raises(UnsupportedModelError, match="leave mtp out of --speculate"):
        async with Engine.open(plain, demo_config("mtp")):
            pass
    with pytest.raises(ConfigError, match=r"'other': choose of auto, off, lookup, mtp"):
        async with Engine.open(plain, demo_config("other")):
            pass
    weights = toy_arch_weights(toy) | next_block_weights(toy)
    weights["blk.4.nextn.enorm.weight"] = np.ones(3, np.float32)
    path = write_toy_arch(
        tmp_path / "m.gguf", toy, weights=weights, metadata=next_block_metadata(toy)
    )
    async with Engine.open(path, demo_config("auto")) as engine:
        with pytest.raises(RequestError, match="speculate names 'mtp'"):
            async for _ in engine.events([1, 2], GREEDY, RequestOptions(speculate=("mtp",))):
                pass
        tokens = [event async for event in engine.generate([1], SamplingParams(max_tokens=2))]
        assert tokens
