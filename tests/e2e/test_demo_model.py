"""The shipped model as users meet it: it answers, it beats a guess, and no schedule changes its words."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine_runs import schedules
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH, DEMO_QUESTIONS
from thermocline.engine.scoring import perplexity
from thermocline.messages import FinishReason

EXPECTED_WORDS = {
    "What is thermocline?": ("mixture-of-experts", "mapped file"),
    "What is a mixture of experts?": ("router", "experts"),
    "Why is a cold expert slow?": ("memory", "disk"),
    "How does prefetch work?": ("experts", "before"),
    "What if my model is larger than RAM?": ("mapped", "prefetch"),
    "What is the capital of France?": ("thermocline",),
}


async def answer(engine: Engine, question: str) -> tuple[str, list[int], FinishReason]:
    prompt = await engine.encode_chat([{"role": "user", "content": question}])
    text, tokens, reason = "", [], None
    async for event in engine.generate(prompt, SamplingParams(max_tokens=120)):
        text += event.text
        tokens += event.token_ids
        reason = event.finish_reason
    return text, tokens, reason


def test_the_expected_words_are_about_questions_that_are_shown():
    """The demo and the tests ask the same things."""
    assert set(EXPECTED_WORDS) <= set(DEMO_QUESTIONS)


@pytest.mark.slow
async def test_it_answers_questions_about_thermocline():
    """Each answer ends by itself and says what the question is about."""
    async with Engine.open(DEMO_MODEL_PATH) as engine:
        for question, words in EXPECTED_WORDS.items():
            text, _, reason = await answer(engine, question)
            assert reason is FinishReason.STOP, (question, text)
            assert 30 < len(text) < 400, (question, text)
            for word in words:
                assert word.lower() in text.lower(), (question, text)


@pytest.mark.slow
async def test_unseen_text_is_predicted_better_than_by_a_guess():
    """Perplexity of the held-out text is well below the vocabulary's size."""
    async with Engine.open(DEMO_MODEL_PATH) as engine:
        ids = await engine.encode(DEMO_HELD_TEXT_PATH.read_text("utf-8"), parse_special=False)
        result = await perplexity(engine, ids)
        assert result.num_scored_tokens == len(ids) - result.num_windows
        assert 1 < result.perplexity < engine.spec.vocab_size / 2


@pytest.mark.slow
async def test_no_schedule_changes_the_answer():
    """Hot share x chunk size x trace: the greedy tokens of a chat answer are the same in all."""
    answers = set()
    for hot, chunk, trace in schedules((0.0, 0.5, 1.0), (1, 7, 64, 1024)):
        config = EngineConfig(
            placement=PlacementConfig(hot_device="cpu" if hot else "none", hot_fraction=hot),
            scheduler=SchedulerConfig(prefill_chunk_tokens=chunk),
            trace=TraceConfig(enabled=trace),
        )
        async with Engine.open(DEMO_MODEL_PATH, config) as engine:
            _, tokens, _ = await answer(engine, DEMO_QUESTIONS[1])
            answers.add(tuple(tokens))
    assert len(answers) == 1


@pytest.mark.slow
async def test_its_routing_is_skewed():
    """Some experts are chosen far more often than others, and none never: there is heat to see."""
    async with Engine.open(DEMO_MODEL_PATH) as engine:
        for question in DEMO_QUESTIONS[:6]:
            await answer(engine, question)
        heat = engine.statistics().heat
    share = np.sort(heat, axis=1)[:, -4:].sum(axis=1) / heat.sum(axis=1)  # of the top 4 of 16
    assert (share > 0.3).all(), share
    assert share.max() > 0.4, share
    assert (heat.sum(axis=0) > 0).all()
