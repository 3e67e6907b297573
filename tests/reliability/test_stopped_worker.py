"""A worker is stopped (SIGSTOP) and goes on later: streams go on with the same tokens, and hardly a pause.

THERMOCLINE_RELIABILITY=full stops it a hundred times instead of three.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import pytest

from tests.support.engine_runs import greedy_tokens
from tests.support.processes import child_pids
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, RemoteConfig, SamplingParams, TraceConfig
from thermocline.traces.events import AsyncSpanEvent
from thermocline.traces.lanes import Name

NUM_STOPS = 100 if os.environ.get("THERMOCLINE_RELIABILITY") == "full" else 3
NUM_STREAMS = 3
NUM_TOKENS = 60
# Four times the usual answer or 30 ms, a look every 20 ms, and the step itself; the rest is for a loaded machine.
# Without a hedge it is --worker-timeout, ten seconds.
MAX_GAP_S = 2.0


class Streams:
    """Streams that follow each other without end; the longest time without a token of any."""

    def __init__(self, engine):
        self.max_gap_s = 0.0
        self.answers = []
        self.num_tokens = 0
        self._engine = engine

    async def run(self, number):
        """Answer until it is cancelled."""
        while True:
            tokens, last_s = [], None
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
            async for event in self._engine.generate(prompt(number), params):
                now_s = time.perf_counter()
                if last_s is not None:
                    self.max_gap_s = max(self.max_gap_s, now_s - last_s)
                last_s = now_s
                tokens += event.token_ids
                self.num_tokens += len(event.token_ids)
            self.answers.append((number, tokens))

    async def wait_tokens(self, count):
        """Wait for so many more tokens of all streams."""
        wanted = self.num_tokens + count
        while self.num_tokens < wanted:  # noqa: ASYNC110 - tokens are counted by several tasks
            await asyncio.sleep(0.002)


def prompt(number):
    """Return a stream's prompt."""
    return [int(token) for token in random.Random(number).choices(range(256), k=20)]


async def until(holds):
    """Wait for what the counters say."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - the counters are all that tells
            await asyncio.sleep(0.002)


def num_answered(engine):
    """Return how many calls the worker has answered."""
    return engine.statistics().remote.workers[0].total_calls


async def wait_used_again(engine):
    """Wait until the worker has answered calls that it was given from now on."""
    calls = num_answered(engine)
    await until(lambda: num_answered(engine) >= calls + 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_stopped_worker_costs_a_step(tmp_path, record_property):
    """No gap near the worker's timeout, the same tokens, one hedge or more for each stop, and then it is used again."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(context=256))
    async with Engine.open(path) as engine:
        expected = [
            await greedy_tokens(engine, prompt(number), NUM_TOKENS) for number in range(NUM_STREAMS)
        ]
    before = child_pids()
    remote = RemoteConfig(("local:1",), mode="batched")
    async with Engine.open(path, EngineConfig(remote=remote, trace=TraceConfig(True))) as engine:
        (worker,) = child_pids() - before
        streams = Streams(engine)

        def is_late():
            return engine.statistics().remote.workers[0].state == "late"

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(streams.run(number)) for number in range(NUM_STREAMS)]
            await streams.wait_tokens(100)
            for number in range(NUM_STOPS):
                await wait_used_again(engine)
                os.kill(worker, signal.SIGSTOP)
                await until(is_late)  # tokens that were computed before may still come
                await streams.wait_tokens(20 + number % 13)
                assert is_late()
                os.kill(worker, signal.SIGCONT)
            await wait_used_again(engine)
            await streams.wait_tokens(NUM_STREAMS * NUM_TOKENS)
            for task in tasks:
                task.cancel()
        assert engine.statistics().remote.total_hedges >= NUM_STOPS
        await engine.check_integrity()
        assert child_pids() - before == {worker}, "the worker was never given up for good"
        spans = [event for event in engine.trace_events() if isinstance(event, AsyncSpanEvent)]
    record_property("largest gap of a stream in seconds", round(streams.max_gap_s, 3))
    assert streams.answers
    assert all(tokens == expected[number] for number, tokens in streams.answers)
    assert streams.max_gap_s < MAX_GAP_S
    assert any(span.name is Name.HEDGE for span in spans)
    assert child_pids() == before
