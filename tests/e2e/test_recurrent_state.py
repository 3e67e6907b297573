"""Recurrent state in a running engine: prompts share it where a snapshot was taken, and nowhere else."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.arch_cases import SCHEDULED_CASES
from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from thermocline import Engine, EngineConfig, SchedulerConfig
from thermocline.config import MemoryConfig

HYBRIDS = {
    case.toy.arch: case.toy
    for case in SCHEDULED_CASES
    if case.toy.arch in ("qwen35moe", "kimi-linear", "jamba")
}
STEM = [(7 * n + n * n) % 256 for n in range(60)]


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, tmp_path_factory):
    """A quantised model with recurrent layers, beside attention and beside latent attention, and with two halves of a state."""
    return write_toy_arch(tmp_path_factory.mktemp("toy") / "toy.gguf", HYBRIDS[request.param])


def config(*, snapshots: int = 4, distance: int = 1024, prefix_cache: bool = True) -> EngineConfig:
    return EngineConfig(
        memory=MemoryConfig(
            max_context_tokens=90,
            block_tokens=8,
            max_snapshots=snapshots,
            snapshot_distance_tokens=distance,
        ),
        scheduler=SchedulerConfig(prefill_chunk_tokens=24, prefix_cache=prefix_cache),
    )


async def hits(engine: Engine, prompt: list[int]) -> int:
    """Return how many tokens of a prompt were found computed."""
    before = (await engine.snapshot()).cache.total_hit_tokens
    await greedy_tokens(engine, prompt, 2)
    return (await engine.snapshot()).cache.total_hit_tokens - before


@pytest.mark.slow
async def test_the_next_turn_begins_where_the_prompt_ended(hybrid):
    """The same prompt, and one that goes on, share all blocks before the prompt's last token."""
    async with Engine.open(hybrid, config()) as engine:
        assert await hits(engine, STEM[:41]) == 0
        assert await hits(engine, STEM[:41]) == 40
        assert await hits(engine, STEM) == 40
        assert await hits(engine, STEM[:39]) == 0  # its blocks are there, a snapshot is not
        await settled(engine)


@pytest.mark.slow
async def test_prompts_that_begin_alike_share_a_snapshot_on_the_way(hybrid):
    """At regular distances there is one, for another prompt with the same beginning."""
    async with Engine.open(hybrid, config(distance=16)) as engine:
        assert await hits(engine, STEM) == 0
        assert await hits(engine, [*STEM[:37], 1, 2, 3]) == 32
        await settled(engine)


@pytest.mark.slow
@pytest.mark.parametrize("snapshots", [0, 1])
async def test_without_room_for_snapshots_answers_are_the_same(hybrid, snapshots):
    """Fewer prefixes are found, and nothing else changes."""
    prompts = [STEM[:41], STEM[:50], [9, *STEM[:20]], STEM[:41]]
    async with Engine.open(hybrid, config(prefix_cache=False)) as engine:
        expected = [await greedy_tokens(engine, prompt, 6) for prompt in prompts]
    async with Engine.open(hybrid, config(snapshots=snapshots)) as engine:
        answers = await asyncio.gather(*(greedy_tokens(engine, prompt, 6) for prompt in prompts))
        again = [await greedy_tokens(engine, prompt, 6) for prompt in prompts]
        await settled(engine)
    assert answers == again == expected


@pytest.mark.slow
async def test_a_preempted_answer_is_computed_again(hybrid):
    """Two answers that do not fit together: one gives way, and both are as if alone."""
    setting = EngineConfig(
        memory=MemoryConfig(max_context_tokens=90, max_full_contexts=1, block_tokens=8),
        scheduler=SchedulerConfig(prefill_chunk_tokens=24, expected_answer_tokens=0),
    )
    prompts = [STEM[:30], [9, *STEM[:20]]]
    async with Engine.open(hybrid, setting) as engine:
        expected = [await greedy_tokens(engine, prompt, 50) for prompt in prompts]
        answers = await asyncio.gather(*(greedy_tokens(engine, prompt, 50) for prompt in prompts))
        assert (await engine.snapshot()).total_preemptions > 0
        await settled(engine)
    assert answers == expected
