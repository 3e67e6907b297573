"""The walk: the same graph and stages as the ring, without queues, on the calling thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_decode, make_work, partial_sum
from thermocline.kernels.lane import LaneThread
from thermocline.messages import Hidden, LayerIndex, StepResult, Tier
from thermocline.pipeline.graph import Shortcut, moe_graph
from thermocline.pipeline.runner import AbandonedError, ChunkFailed, Runner
from thermocline.pipeline.walk import Walk, WalkError
from thermocline.traces.lanes import Lane, Name
from thermocline.traces.recorder import NullRecorder

LAYERS = 3
ROUTES = [[0, 1], [1, 2], [2, 0]]
LAYER = ["attend", "router", "prefetch", "cold", "combine"]


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
    return make_decode(make_chunk(chunk_id))


def end_of(turns) -> StepResult:
    """Take every turn; return the result."""
    while True:
        try:
            next(turns)
        except StopIteration as done:
            return done.value


def test_every_stage_of_every_layer_is_visited_in_order():
    """One chunk, all layers, one stage after the other; hints leave before the compute that they are for."""
    stages = ColdStages()
    result = end_of(Walk(stages.graph()).turns(decode_chunk()))
    assert isinstance(result, StepResult)
    assert stages.visits == ["embed", *LAYER * LAYERS, "head"]


@pytest.mark.parametrize("name", ["embed", "cold", "head"])
def test_a_failing_stage_is_named(name):
    """The error says which stage failed on what, and what it raised."""
    with pytest.raises(WalkError) as caught:
        end_of(Walk(ColdStages(fail_at=name).graph()).turns(decode_chunk()))
    assert caught.value.stage == name
    assert isinstance(caught.value.failure, ArithmeticError)


def test_branches_of_a_walk_run_side_by_side():
    """The hot lane works while the walk computes cold experts; neither waits for the other to begin."""
    order, hot_may_end = [], threading.Event()

    class Split(ColdStages):
        def __init__(self, hot_lane: LaneThread) -> None:
            super().__init__()
            self._lane = hot_lane

        async def router(self, hidden):
            return make_work(hidden.chunk, ROUTES, {0}, layer=hidden.layer)

        async def hot(self, work):
            def job() -> None:
                assert hot_may_end.wait(5)
                hot_may_end.clear()

            await self._lane.run(Name.HOT, job, work.chunk, work.layer)
            order.append("hot")
            return partial_sum(work, Tier.HOT)

        async def cold(self, work):
            order.append("cold")
            hot_may_end.set()
            return partial_sum(work, Tier.COLD)

        def graph(self):
            graph = super().graph()
            return moe_graph({**graph.stages, "hot": self.hot}, LAYERS, 1)

    with LaneThread(Lane.HOT, NullRecorder()) as lane:
        result = end_of(Walk(Split(lane).graph()).turns(decode_chunk()))
    assert isinstance(result, StepResult)
    assert order == ["cold", "hot"] * LAYERS


def test_a_shortcut_takes_the_place_of_a_layer_s_stages():
    """Where it may be used the layer's own stage runs, else the ring's stages do."""
    stages, usable = ColdStages(), True

    async def layer(hidden):
        stages.visits.append("layer")
        return Hidden(hidden.chunk, LayerIndex(hidden.layer + 1), hidden.x)

    shortcut = Shortcut(layer, LAYERS, lambda chunk: usable)
    walk = Walk(moe_graph(stages.graph().stages, LAYERS, 1, shortcut))
    end_of(walk.turns(decode_chunk()))
    assert stages.visits == ["embed", *["layer"] * LAYERS, "head"]
    usable = False
    end_of(walk.turns(decode_chunk()))
    assert stages.visits[LAYERS + 2 :] == ["embed", *LAYER * LAYERS, "head"]


def test_a_stage_that_waits_is_our_bug():
    """Nothing would wake it; the walk says so instead of hanging."""
    with pytest.raises(WalkError) as caught:
        end_of(Walk(ColdStages(waits_at="cold").graph()).turns(decode_chunk()))
    assert isinstance(caught.value.failure, RuntimeError)


@pytest.mark.parametrize("shortcut", [False, True])
def test_a_prompt_may_be_interrupted_between_layers_and_a_decode_step_never(shortcut):
    """Before each layer, whichever way it goes, the walk says which comes; a decode step is one turn."""
    stages = ColdStages()

    async def layer(hidden):
        stages.visits.append("layer")
        return Hidden(hidden.chunk, LayerIndex(hidden.layer + 1), hidden.x)

    way = Shortcut(layer, LAYERS, lambda chunk: shortcut)
    walk = Walk(moe_graph(stages.graph().stages, LAYERS, 1, way))
    turns = walk.turns(make_chunk(0))
    start, layers = (["embed"], ["layer"]) if shortcut else (["embed", "prefetch"], LAYER)
    for number in range(LAYERS):
        assert next(turns) == number
        assert stages.visits == [*start, *layers * number]
    assert isinstance(end_of(turns), StepResult)
    with pytest.raises(StopIteration):
        next(walk.turns(decode_chunk(1)))


def test_a_prompt_in_parts_may_be_interrupted_before_every_stage():
    """Beside answers no turn is longer than a stage, and no layer is one job."""
    stages = ColdStages()

    async def layer(hidden):
        raise AssertionError("not as a whole")

    walk = Walk(
        moe_graph(stages.graph().stages, LAYERS, 1, Shortcut(layer, LAYERS, lambda chunk: True))
    )
    yielded = list(walk.turns(make_chunk(0), in_parts=True))
    assert [number for number in yielded if number is not None] == list(range(LAYERS))
    assert len(yielded) == len(stages.visits)
    assert not any(True for _ in walk.turns(decode_chunk(1), in_parts=True))


async def test_a_chunk_never_overtakes_the_one_in_front_of_it():
    """The first in parts, the second layer by layer: it enters a layer after the first one's attention there."""
    stages = ColdStages()
    seen: list[tuple[str, int, int]] = []

    class Noted(ColdStages):
        async def attend(self, hidden):
            seen.append(("attend", hidden.chunk.id, hidden.layer))
            return await stages.attend(hidden)

        async def layer(self, hidden):
            seen.append(("layer", hidden.chunk.id, hidden.layer))
            return Hidden(hidden.chunk, LayerIndex(hidden.layer + 1), hidden.x)

    noted = Noted()
    way = Shortcut(noted.layer, LAYERS, lambda chunk: True)
    graph = moe_graph(noted.graph().stages, LAYERS, 2, way)
    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        runner = Runner(graph, NullRecorder(), lane)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            await asyncio.sleep(0)
            runner.inject(make_chunk(0, request=1), in_parts=True)
            runner.inject(make_chunk(1, request=1))
            for number in range(2):
                assert (await runner.receive()).chunk.id == number
            runner.check_integrity()
            runner.close()
    for number in range(LAYERS):
        assert seen.index(("attend", 0, number)) < seen.index(("layer", 1, number))
    assert len(seen) == 2 * LAYERS


async def test_decode_steps_walk_always_and_prompts_where_the_graph_is_a_line():
    """A stage that waits is fine in the ring, and fails the chunk that walks."""
    graph = ColdStages(waits_at="cold").graph()
    assert graph.is_line
    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        assert await stages_that_failed(Runner(graph, NullRecorder(), lane)) == ["cold", "cold"]
        ring = replace(graph, is_line=False)
        assert await stages_that_failed(Runner(ring, NullRecorder(), lane)) == [None, "cold"]
        for is_line_for, failed in ((True, ["cold", "cold"]), (False, [None, "cold"])):
            # Its parts are needed, and it is on one lane nevertheless.
            way = Shortcut(
                graph.stages["attend"],
                LAYERS,
                lambda chunk: False,
                lambda chunk, way=is_line_for: way,
            )
            runner = Runner(replace(ring, shortcut=way), NullRecorder(), lane)
            assert await stages_that_failed(runner) == failed


async def stages_that_failed(runner: Runner) -> list[str | None]:
    """Return where a prompt and then a decode step failed."""
    failed: list[str | None] = []
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(runner.run())
        await asyncio.sleep(0)
        for chunk in (make_chunk(0), decode_chunk(1)):
            runner.inject(chunk)
            result = await runner.receive()
            failed.append(result.error.stage if isinstance(result, ChunkFailed) else None)
        runner.check_integrity()
        runner.close()
    return failed


@pytest.mark.parametrize("is_line", [True, False])
async def test_a_chunk_that_nobody_waits_for_ends_after_the_present_job(is_line):
    """Abandoned in the first layer's attention, a prompt is not computed further; the ring is sound after it."""
    stages = ColdStages()

    class Abandoning(ColdStages):
        async def attend(self, hidden):
            runner.abandon(hidden.chunk.requests[0])
            return await stages.attend(hidden)

        async def cold(self, work):
            raise AssertionError("computed for nobody")

    class Walking(Abandoning):
        cold = ColdStages.cold

    graph = (Walking() if is_line else Abandoning()).graph()
    with LaneThread(Lane.CPU, NullRecorder()) as lane:
        runner = Runner(replace(graph, is_line=is_line), NullRecorder(), lane)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            await asyncio.sleep(0)
            runner.inject(make_chunk(0))
            result = await runner.receive()
            assert isinstance(result, ChunkFailed)
            assert isinstance(result.error.__cause__, AbandonedError)
            assert stages.visits == ["attend"]
            runner.check_integrity()
            runner.close()
