"""Any mix of requests under any schedule: each answer is what it is alone, token by token and bit by bit."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arch_cases import (
    CHUNKED_CASE,
    DENSE_CASE,
    DENSE_HYBRID_CASE,
    DENSE_SIBLING_CASES,
    MORE_SCHEDULED_CASES,
    READERS_CASE,
    SCHEDULED_CASES,
    SPARSE_CASE,
)
from tests.support.eager_device import FAST_LINK, SLOW_LINK, eager_device
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    PrefetchConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from thermocline.config import CpuConfig, MemoryConfig

MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
SHAPE = ToyShape(
    layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, formats=MIX, context=96
)
LONGEST = 64
# Prompts that share beginnings of several lengths, a whole one among them.
STEM = [(7 * n + n * n) % 256 for n in range(LONGEST)]
PROMPTS = [
    *(STEM[:length] for length in (1, 16, 33, 48, 60)),
    [*STEM[:32], 5, 4, 3, 2, 1],
    [9, *STEM[:20]],
    [200] * 17,
]


@dataclass(frozen=True)
class Answer:
    """What a request was told: ids, and the log-probabilities as floats, which show any changed bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[object, ...]


async def ask(engine: Engine, prompt: list[int], count: int) -> Answer:
    params = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=3)
    ids: list[int] = []
    logprobs: list[object] = []
    async for event in engine.generate(prompt, params):
        ids += event.token_ids
        logprobs += zip(event.logprobs, event.top_logprobs, strict=True)
    return Answer(tuple(ids), tuple(logprobs))


async def ask_all(path, config: EngineConfig, wanted: list[tuple[int, int, int]]) -> list[Answer]:
    """Return the answers to (prompt, tokens, loop rounds to wait before asking)."""

    async def later(number: int, count: int, rounds: int) -> Answer:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return await ask(engine, PROMPTS[number], count)

    async with Engine.open(path, config) as engine:
        answers = await asyncio.gather(*(later(*one) for one in wanted))
        await settled(engine)
        if engine._parts.experts.hot_device is not None:
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
            engine._parts.experts.hot_device.ring.check_idle()
    return answers


async def answers_alone(path, kernels) -> list[Answer]:
    """Return each prompt's answer, one chunk at a time."""
    config = EngineConfig(
        scheduler=SchedulerConfig(max_prompt_chunks=1, prefix_cache=False, overlap=False),
        prefetch=PrefetchConfig(mode="off"),
        kernels=kernels,
    )
    async with Engine.open(path, config) as engine:
        return [await ask(engine, prompt, 8) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy_model(tmp_path_factory.mktemp("toy") / "toy.gguf", SHAPE)


@pytest.fixture(scope="module")
def alone(request, toy):
    """The kernels, and each prompt's answer with the engine to itself, one chunk at a time."""
    return request.param, asyncio.run(answers_alone(toy, request.param))


SCHEDULES = st.builds(
    EngineConfig,
    scheduler=st.builds(
        SchedulerConfig,
        prefill_chunk_tokens=st.sampled_from([1, 3, 7, 16, 40, 512]),
        max_prompt_chunks=st.integers(1, 4),
        prefix_cache=st.booleans(),
        overlap=st.booleans(),
        decode_slowdown=st.sampled_from([1.0, 1.8, 10.0]),
        expected_answer_tokens=st.sampled_from([0, 0, 4, 512]),
    ),
    placement=st.builds(
        PlacementConfig,
        hot_device=st.sampled_from(["none", "cpu", "simulated"]),
        hot_fraction=st.sampled_from([0.0, 0.4, 1.0]),
        expert_cache=st.sampled_from(["static", "off"]),
    )
    # A cache with room for all experts, for some, for hardly one, for none; and little memory beside it.
    | st.builds(
        PlacementConfig,
        hot_device=st.just("simulated"),
        expert_budget_bytes=st.sampled_from([None, 2_000_000, 700_000, 0]),
        simulated_memory_bytes=st.sampled_from([4 << 30, 5_000_000]),
        simulated_copy_bytes_per_s=st.sampled_from([FAST_LINK, SLOW_LINK]),
    ),
    # From room for all requests down to room for hardly more than one, which forces preemption.
    memory=st.builds(
        MemoryConfig,
        max_context_tokens=st.just(LONGEST + 8),
        max_full_contexts=st.integers(1, 8),
        block_tokens=st.sampled_from([1, 4, 16]),
        max_windows=st.sampled_from([1, 2, 32]),
    ),
    prefetch=st.builds(PrefetchConfig, mode=st.sampled_from(["auto", "on", "off"])),
    trace=st.builds(TraceConfig, enabled=st.booleans()),
    cpu=st.builds(CpuConfig, threads=st.integers(1, 2)),
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 8), st.integers(0, 20)),
    min_size=1,
    max_size=8,
)


# The longer target sets more.
TIMES = int(os.environ.get("THERMOCLINE_SCHEDULES", "1"))
MORE = [case for case in MORE_SCHEDULED_CASES if case is not CHUNKED_CASE]
# Of those whose parts others have in the same arithmetic, none in the suite.
_PLAIN = ("llama", "olmoe", "qwen2moe", "qwen3next", "granitehybrid")
SOME = [case for case in SCHEDULED_CASES if TIMES > 1 or case.toy.arch not in _PLAIN]
OTHERS = (
    *(*SOME, DENSE_CASE, DENSE_HYBRID_CASE, READERS_CASE, CHUNKED_CASE, SPARSE_CASE),
    *((*MORE, *DENSE_SIBLING_CASES) if TIMES > 1 else ()),
)


@pytest.fixture(scope="module", params=OTHERS, ids=str)
def other(request, tmp_path_factory):
    """Another architecture's toy model, and each prompt's answer with the engine to itself."""
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    write_toy_arch(path, request.param.toy)
    return path, ("native", asyncio.run(answers_alone(path, "native")))


def check(toy, alone, config: EngineConfig, wanted: list[tuple[int, int, int]]) -> None:
    kernels, expected = alone
    setting = EngineConfig(
        memory=config.memory,
        placement=config.placement,
        scheduler=config.scheduler,
        prefetch=config.prefetch,
        cpu=config.cpu,
        trace=config.trace,
        kernels=kernels,
    )
    with eager_device():
        answers = asyncio.run(ask_all(toy, setting, wanted))
    for (number, count, _), answer in zip(wanted, answers, strict=True):
        assert answer.token_ids == expected[number].token_ids[:count]
        assert answer.logprobs == expected[number].logprobs[:count]


def examples(count: int) -> settings:
    """Return settings for so many random schedules, the same ones each time."""
    return settings(max_examples=count * TIMES, deadline=None, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["native"], indirect=True)
@examples(24)
@given(config=SCHEDULES, wanted=REQUESTS)
def test_any_schedule_gives_each_request_its_own_answer(toy, alone, config, wanted):
    """Chunking, batching, preemption, sharing, tiers, prefetch and overlap change no bit of an answer."""
    check(toy, alone, config, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["reference"], indirect=True)
@examples(3)
@given(config=SCHEDULES, wanted=REQUESTS)
def test_the_same_holds_for_reference_compute(toy, alone, config, wanted):
    """The slow twins give bit-identical logits under any schedule."""
    check(toy, alone, config, wanted)


@pytest.mark.slow
@examples(4)
@given(config=SCHEDULES, wanted=REQUESTS)
def test_the_same_holds_for_every_architecture(other, config, wanted):
    """Whatever a layer consists of, no schedule changes a bit of an answer."""
    path, alone = other
    check(path, alone, config, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_answers_that_do_not_fit_together_are_preempted_and_complete(toy, prefix_cache):
    """Two answers grow until the cache has no room for both: one gives way, and both are as if alone."""
    config = EngineConfig(
        memory=MemoryConfig(max_context_tokens=LONGEST + 8, max_full_contexts=1, block_tokens=4),
        scheduler=SchedulerConfig(
            prefix_cache=prefix_cache, prefill_chunk_tokens=16, expected_answer_tokens=0
        ),
    )
    async with Engine.open(toy, config) as engine:
        expected = [await ask(engine, PROMPTS[number], 40) for number in (1, 7)]
        assert (await engine.snapshot()).total_preemptions == 0
        answers = await asyncio.gather(*(ask(engine, PROMPTS[number], 40) for number in (1, 7)))
        assert (await engine.snapshot()).total_preemptions > 0
        await settled(engine)
    assert answers == expected
