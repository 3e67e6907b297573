"""Many requests that end in every possible way: each has one terminal event, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from tests.support.settled import settled, turns
from tests.support.toy_model import write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, SamplingParams, SchedulerConfig
from thermocline.config import MemoryConfig
from thermocline.errors import BusyError
from thermocline.pipeline.generation import Generation

NUM_REQUESTS = 80
NUM_CANCELLED = 2000 if os.environ.get("THERMOCLINE_RELIABILITY") == "full" else 500


@pytest.fixture
def endings(monkeypatch) -> Counter[int]:
    """Counts the terminal events by request."""
    counts: Counter[int] = Counter()
    real = Generation._publish_end

    def counting(self, event):
        counts[self.request] += 1
        real(self, event)

    monkeypatch.setattr(Generation, "_publish_end", counting)
    return counts


async def one_request(
    engine: Engine, rng: random.Random, tally: Counter[str], places: asyncio.Semaphore
) -> None:
    """Ask for something, and leave in a random way at a random point."""
    async with places:
        await ask(engine, rng, tally)


async def ask(engine: Engine, rng: random.Random, tally: Counter[str]) -> None:
    """Send one request, again and again while the engine is busy."""
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    params = SamplingParams(max_tokens=rng.randint(0, 12), ignore_eos=True)
    leave_after = rng.choice([None, None, 0, 1, 4])
    while True:
        try:
            tally[await read(engine, prompt, params, leave_after)] += 1
        except BusyError:
            tally["busy"] += 1
            await turns(engine, 20)
        else:
            return


async def read(
    engine: Engine, prompt: list[int], params: SamplingParams, leave_after: int | None
) -> str:
    """Read an answer to its end, or leave after some events; return which it was."""
    stream = engine.generate(prompt, params)
    num_events = 0
    async for event in stream:
        num_events += 1
        if event.finish_reason is None and num_events == leave_after:
            await stream.aclose()
            return "left"
    return "finished"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_every_accepted_request_ends_exactly_once(tmp_path, endings, seed):
    """80 requests of which some finish, some are left, some cancelled, and some refused as busy."""
    rng, tally = random.Random(seed), Counter[str]()
    places = asyncio.Semaphore(14)  # two more than the engine accepts
    config = EngineConfig(
        scheduler=SchedulerConfig(prefill_chunk_tokens=5, max_requests=12),
        placement=PlacementConfig(hot_device="cpu", hot_fraction=0.5),
    )
    async with Engine.open(write_toy_model(tmp_path / "toy.gguf"), config) as engine:
        tasks = []
        for _ in range(NUM_REQUESTS):
            tasks.append(asyncio.create_task(one_request(engine, rng, tally, places)))
            if rng.random() < 0.4:
                await turns(engine, rng.randrange(40))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        unexpected = [
            r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)
        ]
        assert not unexpected, unexpected
        await settled(engine)
    assert set(endings.values()) == {1}, endings
    assert min(tally["finished"], tally["left"], tally["busy"]) > 0, tally
    assert tally["finished"] + tally["left"] <= len(endings) <= NUM_REQUESTS


@pytest.mark.slow
async def test_hundreds_of_cancelled_requests_leave_nothing(tmp_path):
    """Cancelled at any point, queued or computed: no task, block, credit or message stays."""
    rng = random.Random(11)
    config = EngineConfig(
        memory=MemoryConfig(max_context_tokens=64, max_full_contexts=2, block_tokens=4),
        scheduler=SchedulerConfig(prefill_chunk_tokens=7, max_prompt_chunks=3),
        placement=PlacementConfig(hot_device="simulated", hot_fraction=0.5, expert_cache="static"),
    )

    async def cancelled(engine: Engine) -> None:
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        task = asyncio.create_task(read(engine, prompt, params, None))
        for _ in range(rng.choice([0, 1, 2, 4, 8, 30])):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            await turns(engine, rng.randrange(40))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with Engine.open(write_toy_model(tmp_path / "toy.gguf"), config) as engine:
        tasks_before = len(asyncio.all_tasks())
        for _ in range(NUM_CANCELLED // 25):
            await asyncio.gather(*(cancelled(engine) for _ in range(25)))
        await settled(engine)
        assert len(asyncio.all_tasks()) == tasks_before
        for channel in engine.statistics().channels:
            assert channel.peak_depth <= channel.capacity
        assert await read(engine, [1, 2, 3], SamplingParams(max_tokens=3), None) == "finished"
