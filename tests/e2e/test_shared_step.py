"""Decode steps that a device and the CPU share: every bit is the CPU's, wherever experts are and whatever moves."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest

from tests.support.arch_cases import MORE_SCHEDULED_CASES, SCHEDULED_CASES
from tests.support.eager_device import FAST_LINK, eager_device
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, SamplingParams, SchedulerConfig
from thermocline.config import SpeculationConfig, TraceConfig
from thermocline.errors import StageError, StepLostError
from thermocline.experts.backends import hot_device
from thermocline.experts.cache.policy import Move, StaticCache
from thermocline.experts.cache.store import ExpertStore
from thermocline.kernels import handoff
from thermocline.messages import ExpertKey
from thermocline.models.device import simulated_step
from thermocline.stages.shared_model import SharedModelStage
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane, Name

FORMATS = {"attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
SHAPE = ToyShape(
    layers=2,
    hidden=256,
    heads=4,
    head_dim=64,
    intermediate=256,
    used=3,
    formats=FORMATS,
    context=96,
)
PROMPTS = [[(13 * n + n * n + seed) % 200 for n in range(5 + seed)] for seed in range(8)]
NUM_TOKENS = 24  # so many that the first answer goes on when the last one begins


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy_model(tmp_path_factory.mktemp("toy") / "toy.gguf", SHAPE)


def settings(*, trace: bool = False, overlap: bool = True, **placement) -> EngineConfig:
    return EngineConfig(
        placement=PlacementConfig(**placement),
        scheduler=SchedulerConfig(prefix_cache=False, overlap=overlap),
        speculation=SpeculationConfig(drafters="off"),  # rows are counted
        trace=TraceConfig(enabled=trace),
    )


def half(fraction: float = 0.5, **more) -> EngineConfig:
    return settings(
        hot_device="simulated",
        simulated_copy_bytes_per_s=FAST_LINK,
        expert_cache="static",
        hot_fraction=fraction,
        **more,
    )


async def answer(engine: Engine, prompt) -> list[object]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, logprobs=2)
    found: list[object] = []
    async for event in engine.generate(prompt, params):
        found += zip(event.token_ids, event.logprobs, event.top_logprobs, strict=True)
    return found


async def answers_of_the_cpu(path, prompts=PROMPTS) -> list[list[object]]:
    async with Engine.open(path, settings()) as engine:
        return [await answer(engine, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(toy):
    return asyncio.run(answers_of_the_cpu(toy))


@contextmanager
def counted_steps(monkeypatch):
    """Yield the numbers of rows of the steps that were shared."""
    rows, compute = [], SharedModelStage._compute

    def counted(self, step):
        rows.append(step.chunk.num_tokens)
        return compute(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(SharedModelStage, "_compute", counted)
        yield rows


@pytest.mark.slow
@pytest.mark.parametrize("num_answers", [1, 2, 5, 8])
@pytest.mark.parametrize("fraction", [0.0, 0.51, 1.0])
async def test_every_bit_is_the_cpus(toy, expected, monkeypatch, fraction, num_answers):
    """With none, half or all of the experts on the device, for one to eight answers at once."""
    monkeypatch.setattr(ExpertStore, "is_empty", False)  # else none on the device is the CPU alone
    with counted_steps(monkeypatch) as rows, eager_device():
        async with Engine.open(toy, half(fraction)) as engine:
            found = await asyncio.gather(
                *(answer(engine, prompt) for prompt in PROMPTS[:num_answers])
            )
            await settled(engine)
            store = engine._parts.experts.hot_device.store
            store.check_integrity(idle=True)
            shares = store.statistics()
    assert found == expected[:num_answers]
    assert max(rows) == num_answers
    assert (shares.total_hits == 0) == (fraction == 0.0)
    assert (shares.total_misses == 0) == (fraction == 1.0)


class Rotating(StaticCache):
    """Puts an absent expert in the place of one that is there, always."""

    def __init__(self, expert_bytes):
        super().__init__(expert_bytes)
        self.pending = set()

    def next_move(self, leased):
        keys = [
            ExpertKey.of(layer, n) for n in range(SHAPE.experts) for layer in range(SHAPE.layers)
        ]
        there = [key for key in self._installed if key not in leased]
        known = {*self._installed, *self.pending, *leased}
        absent = [key for key in keys if key not in known]
        if not (absent and there):
            return None
        self.pending.add(absent[0])
        return Move(absent[0], (there[0],), 1)

    def installed(self, key):
        self.pending.discard(key)
        super().installed(key)

    def dropped(self, key):
        self.pending.discard(key)
        super().dropped(key)


@pytest.mark.slow
async def test_experts_move_in_every_step(toy, expected, monkeypatch):
    """In the middle of each step experts leave and others come: what a step began with it ends with."""
    serve, moved, copied = handoff.Handoff.serve, [], threading.Event()

    def serve_and_move(self, num_rows, epoch):
        before = store.statistics().total_evictions
        store.promote()
        moved.append(store.statistics().total_evictions - before)
        while store.statistics().num_copying:
            copied.wait(1)
            copied.clear()
        serve(self, num_rows, epoch)

    monkeypatch.setattr(hot_device, "StaticCache", Rotating)
    monkeypatch.setattr(handoff.Handoff, "serve", serve_and_move)
    with eager_device():
        async with Engine.open(toy, half(0.51)) as engine:
            store = engine._parts.experts.hot_device.store
            store.bind((), store._kept_away)  # nothing is pinned
            store.on_change(copied.set, lambda: False)
            found = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS[:3]))
            found += [await answer(engine, prompt) for prompt in PROMPTS[3:5]]
            await settled(engine)
            store.check_integrity(idle=True)
    assert found == expected[:5]
    assert len(moved) > NUM_TOKENS
    assert sum(map(bool, moved)) > 0.9 * len(moved)
    assert store.statistics().total_uploads > len(moved)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED_CASES + MORE_SCHEDULED_CASES, ids=str)
async def test_every_architecture_shares_steps(case, tmp_path, monkeypatch):
    """Recurrent and latent layers, windows, dense layers, single blocks: the same bits, two answers at once."""
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    wanted = await answers_of_the_cpu(path, PROMPTS[:2])
    with counted_steps(monkeypatch) as rows, eager_device():
        async with Engine.open(path, half()) as engine:
            assert await asyncio.gather(*(answer(engine, each) for each in PROMPTS[:2])) == wanted
    assert 2 in rows


@pytest.mark.slow
async def test_the_timeline_has_each_layers_parts_on_both_sides(toy):
    """The device attends and routes, both compute, the device adds up; nothing on a track overlaps."""
    with eager_device():
        async with Engine.open(toy, half(0.51, trace=True)) as engine:
            await answer(engine, PROMPTS[0])
            await settled(engine)
            events = engine.trace_events()
    spans = [event for event in events if isinstance(event, SpanEvent) and event.args]
    steps = {
        event.args["chunk"]
        for event in spans
        if event.name is Name.COMBINE and event.lane is Lane.HOT
    }
    assert len(steps) >= NUM_TOKENS // 2
    for chunk in steps:
        mine = [event for event in spans if event.args.get("chunk") == chunk]
        hot = sorted((e for e in mine if e.lane is Lane.HOT), key=lambda e: e.start_ns)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(hot))
        assert {e.args["layer"] for e in hot} == set(range(SHAPE.layers))
        assert {e.name for e in hot} >= {Name.ATTEND, Name.ROUTER, Name.COMBINE}
        cold = [e for e in mine if e.lane is Lane.CPU and e.name is Name.COLD]
        for event in cold:
            layer = event.args["layer"]
            before = [e for e in hot if e.args["layer"] == layer and e.name is Name.ROUTER]
            after = [e for e in hot if e.args["layer"] == layer and e.name is Name.COMBINE]
            assert before[0].end_ns <= event.start_ns
            assert event.end_ns <= after[0].end_ns
        assert cold


@pytest.mark.slow
async def test_python_does_not_count_layers(tmp_path, monkeypatch):
    """A step takes as many calls of Python on the CPU's side for six layers as for two; a layer has few nodes."""
    calls, run = {}, SharedModelStage.run

    def counted(self, hidden):
        found = []
        sys.setprofile(lambda frame, event, arg: found.append(event) if "call" in event else None)
        try:
            return run(self, hidden)
        finally:
            sys.setprofile(None)
            calls[layers].append(len(found))

    monkeypatch.setattr(SharedModelStage, "run", counted)
    for layers in (2, 6):
        calls[layers] = []
        shape = ToyShape(layers=layers, hidden=64, heads=2, head_dim=32, intermediate=64, used=3)
        path = write_toy_model(tmp_path / f"{layers}.gguf", shape)
        with eager_device():
            async with Engine.open(path, half()) as engine:
                await answer(engine, PROMPTS[0])
                stage = engine._parts.runner._executors
        step = next(
            each._stage
            for each in stage.values()
            if isinstance(getattr(each, "_stage", None), SharedModelStage)
        )
        assert len(step.device.node_spans()) <= 12 * layers
    assert min(calls[2]) == min(calls[6])
    assert sorted(calls[2])[len(calls[2]) // 2] == sorted(calls[6])[len(calls[6]) // 2]


@pytest.mark.slow
async def test_a_lost_step_fails_its_request_alone(toy, expected, monkeypatch, caplog):
    """A device that does nothing: that request fails, the next goes on; after the second, stage by stage."""
    monkeypatch.setattr(handoff, "PATIENCE_NS", (50_000_000, 100_000_000))
    launch, silent = simulated_step.SimulatedStep.launch, [True]

    def launch_or_not(self, given, step):
        launch(self, given, step)
        if silent and silent.pop():
            # It is computed on a page that nobody serves.
            given.page = given._new_page()

    monkeypatch.setattr(simulated_step.SimulatedStep, "launch", launch_or_not)
    monkeypatch.setattr(simulated_step, "PATIENCE_NS", (50_000_000, 100_000_000))
    with counted_steps(monkeypatch) as rows, eager_device():
        async with Engine.open(toy, half()) as engine:
            with pytest.raises(StageError) as failed:
                await answer(engine, PROMPTS[0])
            assert isinstance(failed.value.__cause__, StepLostError)
            assert await answer(engine, PROMPTS[1]) == expected[1]
            assert len(rows) > 1
            silent.append(True)
            with pytest.raises(
                StageError, match="a decode step of the device and the CPU was lost"
            ):
                await answer(engine, PROMPTS[2])
            before = len(rows)
            assert await answer(engine, PROMPTS[3]) == expected[3]
            await settled(engine)
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
    assert len(rows) == before
    assert "stage by stage from now on" in caplog.text


@pytest.mark.slow
async def test_what_fails_on_the_device_is_told(toy, expected, monkeypatch):
    """An error of the device is the request's, at once, and the next request goes on."""
    run, broken = simulated_step.SimulatedStep._run, [True]

    def fail(self, compute, *rest):
        def failing():
            raise OSError("the device caught fire")

        run(self, failing if broken and broken.pop() else compute, *rest)

    monkeypatch.setattr(simulated_step.SimulatedStep, "_run", fail)
    with eager_device():
        async with Engine.open(toy, half()) as engine:
            with pytest.raises(StageError, match="caught fire"):
                await answer(engine, PROMPTS[0])
            assert await answer(engine, PROMPTS[1]) == expected[1]
            await settled(engine)
            engine._parts.experts.hot_device.store.check_integrity(idle=True)


@pytest.mark.slow
async def test_what_fails_on_the_cpu_loses_the_step(toy, expected, monkeypatch):
    """The CPU has no memory for its part: the device stops waiting, and the next request goes on."""
    make, broken = handoff.Handoff._new_page, [True]

    class Failing:
        def __init__(self, page, server):
            self._page, self._server = page, server

        def serve(self, num_rows, epoch, *rest):
            if broken:
                broken.pop()
                self._page.abort(epoch)
                raise MemoryError("no more")
            return self._server.serve(num_rows, epoch, *rest)

        def finish(self, *rest):
            return self._server.finish(*rest)

    def with_failure(self):
        page = make(self)
        self._server = Failing(page, self._server)
        return page

    monkeypatch.setattr(handoff.Handoff, "_new_page", with_failure)
    with eager_device():
        async with Engine.open(toy, half()) as engine:
            with pytest.raises(StageError, match="MemoryError: no more"):
                await answer(engine, PROMPTS[0])
            assert await answer(engine, PROMPTS[1]) == expected[1]
            await settled(engine)
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
