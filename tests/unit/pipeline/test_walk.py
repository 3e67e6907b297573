"""The walk: the same graph and stages as the ring, without queues, on the calling thread."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_work, partial_sum
from thermocline.messages import Hidden, LayerIndex, SegmentKind, StepResult, Tier
from thermocline.pipeline.graph import moe_graph
from thermocline.pipeline.runner import ChunkFailed, Runner
from thermocline.pipeline.walk import Walk, WalkError
from thermocline.traces.recorder import NullRecorder

LAYERS = 3
ROUTES = [[0, 1], [1, 2], [2, 0]]


class ColdStages:
    """Stages of a model without a hot tier; `waits_at` names one that waits for something."""

    def __init__(self, *, fail_at: str = "", waits_at: str = "") -> None:
        self.visits: list[str] = []
        self._fail_at, self._waits_at = fail_at, waits_at

    async def _visit(self, name: str) -> None:
        self.visits.append(name)
        if name == self._fail_at:
            raise ArithmeticError("failed as told")
        if name == self._waits_at:
            await asyncio.sleep(0)

    async def embed(self, chunk):
        await self._visit("embed")
        return Hidden(chunk, LayerIndex(0), np.zeros((chunk.num_tokens, 4), np.float32))

    async def attend(self, hidden):
        await self._visit("attend")
        return hidden

    async def router(self, hidden):
        await self._visit("router")
        return make_work(hidden.chunk, ROUTES, set(), layer=hidden.layer)

    async def prefetch(self, work):
        await self._visit("prefetch")

    async def cold(self, work):
        await self._visit("cold")
        return partial_sum(work, Tier.COLD)

    async def combine(self, joined):
        await self._visit("combine")
        return Hidden(joined.work.chunk, LayerIndex(joined.work.layer + 1), joined.work.residual)

    async def head(self, hidden):
        await self._visit("head")
        return StepResult(hidden.chunk, np.ones((1, 8), np.float32))

    def graph(self):
        names = ("embed", "attend", "router", "prefetch", "cold", "combine", "head")
        return moe_graph({name: getattr(self, name) for name in names}, LAYERS, 1)


def decode_chunk(chunk_id: int = 0):
    chunk = make_chunk(chunk_id)
    kinds = tuple(segment._replace(kind=SegmentKind.DECODE) for segment in chunk.segments)
    return replace(chunk, segments=kinds)


def test_every_stage_of_every_layer_is_visited_in_order():
    """One chunk, all layers, one stage after the other; hints leave before the compute that they are for."""
    stages = ColdStages()
    result = Walk(stages.graph()).run(decode_chunk())
    assert isinstance(result, StepResult)
    layer = ["attend", "router", "prefetch", "cold", "combine"]
    assert stages.visits == ["embed", *layer * LAYERS, "head"]


@pytest.mark.parametrize("name", ["embed", "cold", "head"])
def test_a_failing_stage_is_named(name):
    """The error says which stage failed on what, and what it raised."""
    with pytest.raises(WalkError) as caught:
        Walk(ColdStages(fail_at=name).graph()).run(decode_chunk())
    assert caught.value.stage == name
    assert isinstance(caught.value.failure, ArithmeticError)


def test_a_stage_that_waits_is_our_bug():
    """Nothing would wake it; the walk says so instead of hanging."""
    with pytest.raises(WalkError) as caught:
        Walk(ColdStages(waits_at="cold").graph()).run(decode_chunk())
    assert isinstance(caught.value.failure, RuntimeError)


async def test_the_runner_walks_a_lone_decode_and_sends_prompts_round_the_ring():
    """A stage that waits is fine in the ring, and fails the chunk that walks."""
    runner = Runner(ColdStages(waits_at="cold").graph(), NullRecorder())
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(runner.run())
        await asyncio.sleep(0)
        runner.inject(make_chunk(0))
        assert isinstance(await runner.receive(), StepResult)
        runner.inject(decode_chunk(1))
        failed = await runner.receive()
        assert isinstance(failed, ChunkFailed)
        assert failed.error.stage == "cold"
        runner.check_integrity()
        runner.close()
