"""Decode steps that a torch device and the CPU share: to the bit what their layers are one after another."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.support.arch_cases import IS_LONG, SCHEDULED_CASES
from tests.support.devices import DEVICES
from tests.support.eager_device import eager_device
from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    PrefetchConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from thermocline.engine.shared_step_check import LayerByLayer
from thermocline.errors import StageError, StepLostError
from thermocline.experts.backends import hot_device
from thermocline.experts.backends.full_device import FullDevice
from thermocline.experts.cache.policy import Move, StaticCache
from thermocline.experts.cache.store import ExpertStore
from thermocline.kernels import handoff
from thermocline.kernels.gpu import handoff_page, resident
from thermocline.kernels.gpu.handoff_page import DevicePage
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.messages import ExpertKey
from thermocline.models.device.shared_step import DeviceSharedStep
from thermocline.stages.shared_model import SharedModelStage

FORMATS = {"attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
SHAPE = ToyShape(
    layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, formats=FORMATS
)
PROMPTS = [[(13 * n + n * n + seed) % 200 for n in range(5 + seed)] for seed in range(8)]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model of quantised experts."""
    return write_toy_model(tmp_path_factory.mktemp("toy") / "toy.gguf", SHAPE)


def settings(device: str = "torch-cpu", fraction: float = 0.51) -> EngineConfig:
    return EngineConfig(
        placement=PlacementConfig(
            hot_device=device, trunk_device=device, expert_cache="static", hot_fraction=fraction
        ),
        scheduler=SchedulerConfig(prefix_cache=False),
        prefetch=PrefetchConfig(mode="off"),  # its hints come from single layers
        speculation=SpeculationConfig(drafters="off"),  # one row for each token
    )


async def answers(engine: Engine, count: int, tokens: int = NUM_TOKENS) -> list[list[int]]:
    asked = [greedy_tokens(engine, prompt, tokens) for prompt in PROMPTS[:count]]
    return list(await asyncio.gather(*asked))


@contextmanager
def compared_steps(monkeypatch):
    """Compute every shared step again, layer by layer; yield the rows of each, and how many pairs were hot and cold."""
    steps, compute = [], SharedModelStage._compute
    # As stage by stage, where torch's CPU multiplies the rows of an expert together.
    monkeypatch.setattr(resident, "_MAX_UNSORTED_PAIRS", 0)

    def both(self, step):
        x, residency, device = step.x, step.residency, self.device._non_expert
        states = [part for each in device._states.values() for part in (each.conv, each.recurrent)]
        before = [part.clone() for part in states]
        found = compute(self, step)
        with torch.inference_mode():
            for part, old in zip(states, before, strict=True):
                part.copy_(old)
        expected = layers[0].step(step.chunk, x, residency)
        np.testing.assert_array_equal(found, expected)
        ids = self.handoff.routing(len(x)).expert_ids
        is_hot = residency[self._routed[:, None, None], ids] >= 0
        steps.append((len(x), int(is_hot.sum()), int((~is_hot).sum())))
        return found

    monkeypatch.setattr(SharedModelStage, "_compute", both)
    layers: list[LayerByLayer] = []

    def use(engine: Engine) -> None:
        hot, stage = engine._parts.experts.hot_device, shared_stage(engine)
        given = (stage.device._non_expert, hot.device, hot.catalog, stage.handoff._kernels)
        layers.append(LayerByLayer(*given))

    yield steps, use


def shared_stage(engine: Engine) -> SharedModelStage | None:
    stages = (getattr(each, "_stage", None) for each in engine._parts.runner._executors.values())
    return next((each for each in stages if isinstance(each, SharedModelStage)), None)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fraction", "num_answers"), [(0.0, 3), (0.51, 1), (0.51, 8), (1.0, 5)])
async def test_every_bit_is_that_of_its_layers(toy, monkeypatch, device, fraction, num_answers):
    """With none, half or all of the experts on the device, for one to eight answers at once."""
    monkeypatch.setattr(FullDevice, "is_full", False)  # else all of them is one job without the CPU
    with compared_steps(monkeypatch) as (steps, use), eager_device():
        # A device without any expert takes no steps, so it has some that are not looked at.
        async with Engine.open(toy, settings(device, fraction or 0.51)) as engine:
            if not fraction:
                none = np.full((SHAPE.layers, SHAPE.experts), -1, np.int32)
                monkeypatch.setattr(ExpertStore, "_hold", lambda self: held(self, none))
            use(engine)
            await answers(engine, num_answers, 12)  # so many that all of them meet
            await settled(engine)
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
    assert max(rows for rows, _, _ in steps) == num_answers
    assert sum(rows for rows, _, _ in steps) == num_answers * 11
    assert any(hot for _, hot, _ in steps) == (fraction > 0)
    assert any(cold for _, _, cold in steps) == (fraction < 1)


def held(store: ExpertStore, residency: np.ndarray) -> tuple[np.ndarray, ...]:
    """Hold, and say that the slots are those of `residency`."""
    store._num_holds += 1
    return tuple(residency)


class Rotating(StaticCache):
    """Puts an absent expert in the place of one that is there, always."""

    def next_move(self, leased):
        keys = [
            ExpertKey.of(layer, n) for n in range(SHAPE.experts) for layer in range(SHAPE.layers)
        ]
        there = [key for key in self._installed if key not in leased]
        absent = [key for key in keys if key not in self._installed and key not in leased]
        return Move(absent[0], (there[0],), 1) if absent and there else None


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_experts_move_in_every_step(toy, monkeypatch, device):
    """In the middle of each step experts leave and others come: what a step began with it ends with."""
    serve, moved, stores = handoff.Handoff.serve, [], []

    def serve_and_move(self, num_rows, epoch):
        for store in stores:  # none for steps that are tried while the engine opens
            before = store.statistics().total_evictions
            store.promote()
            moved.append(store.statistics().total_evictions - before)
        serve(self, num_rows, epoch)

    monkeypatch.setattr(hot_device, "StaticCache", Rotating)
    monkeypatch.setattr(handoff.Handoff, "serve", serve_and_move)
    with compared_steps(monkeypatch) as (steps, use), eager_device():
        async with Engine.open(toy, settings(device)) as engine:
            use(engine)
            store = engine._parts.experts.hot_device.store
            store.bind((), store._kept_away)  # nothing is pinned
            stores.append(store)
            await answers(engine, 3)
            await settled(engine)
            store.check_integrity(idle=True)
    assert len(steps) == len(moved) >= NUM_TOKENS - 1
    assert sum(moved) > len(moved) // 2
    assert any(hot and cold for _, hot, cold in steps)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in SCHEDULED_CASES
        if case.toy.arch in ("gpt-oss", "deepseek2", "nemotron_h_moe")
        or (IS_LONG and case.toy.arch in ("qwen3next", "laguna"))
    ],
    ids=str,
)
async def test_recurrent_states_and_windows(case, device, tmp_path, monkeypatch):
    """And latent rows, dense layers, single blocks, shared experts, and biases of experts: two answers at once."""
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    with compared_steps(monkeypatch) as (steps, use), eager_device():
        async with Engine.open(path, settings(device)) as engine:
            use(engine)
            await answers(engine, 2)
            await settled(engine)
    assert any(rows == 2 and hot and cold for rows, hot, cold in steps)


@pytest.mark.slow
async def test_python_of_the_cpu_does_not_count_layers(tmp_path, monkeypatch):
    """A step takes as many calls on the CPU's side for six layers as for two."""
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
            async with Engine.open(path, settings()) as engine:
                for _ in range(4):  # a promotion between two steps costs calls too
                    await answers(engine, 1)
    assert min(calls[2]) == min(calls[6])


@pytest.mark.slow
async def test_a_lost_step_fails_its_request_alone(toy, monkeypatch, caplog):
    """A CPU that never comes, then a page that is given up: the request is told, the next goes on, at last by stages."""
    rows, compute, serve, launch = (
        [],
        SharedModelStage._compute,
        handoff.Handoff.serve,
        DeviceSharedStep.launch,
    )
    faults: list[str] = []

    def counted(self, step):
        rows.append(len(step.x))
        return compute(self, step)

    def late(self, num_rows, epoch):
        if faults and faults[-1] == "late":
            faults.pop()
            device[0]._done.result()  # the device gives up first
        serve(self, num_rows, epoch)

    def aborted(self, given, step):
        if faults and faults[-1] == "aborted":
            faults.pop()
            given.page.abort(step.epoch)
        launch(self, given, step)

    monkeypatch.setattr(SharedModelStage, "_compute", counted)
    monkeypatch.setattr(handoff.Handoff, "serve", late)
    monkeypatch.setattr(DeviceSharedStep, "launch", aborted)
    with eager_device():
        async with Engine.open(toy, settings(fraction=0.3)) as engine:
            device = [shared_stage(engine).device]
            expected = [await greedy_tokens(engine, prompt, NUM_TOKENS) for prompt in PROMPTS[:2]]
            init = DevicePage.__init__

            def hasty(self, *given, **rest):
                init(self, *given, **(rest | {"patience_ns": (20_000_000, 50_000_000)}))

            monkeypatch.setattr(DevicePage, "__init__", hasty)
            device[0]._experts = None
            faults.append("late")
            with pytest.raises(StageError) as failed:
                await greedy_tokens(engine, PROMPTS[0], NUM_TOKENS)
            assert isinstance(failed.value.__cause__, StepLostError)
            monkeypatch.setattr(DevicePage, "__init__", init)
            assert await greedy_tokens(engine, PROMPTS[1], NUM_TOKENS) == expected[1]
            faults.append("aborted")
            with pytest.raises(
                StageError, match="a decode step of the device and the CPU was lost"
            ):
                await greedy_tokens(engine, PROMPTS[0], NUM_TOKENS)
            before = len(rows)
            assert await greedy_tokens(engine, PROMPTS[0], NUM_TOKENS) == expected[0]
            await settled(engine)
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
    assert before > 3 * (NUM_TOKENS - 1)
    assert len(rows) == before
    assert "stage by stage from now on" in caplog.text


@pytest.mark.slow
async def test_what_fails_on_the_device_is_told(toy, monkeypatch):
    """An error in the middle of a step is the request's, at once, and the next request goes on."""
    combine, broken = DevicePage.combine, []

    def failing(self, *given):
        if broken:
            broken.pop()
            raise OSError("the device caught fire")
        return combine(self, *given)

    monkeypatch.setattr(DevicePage, "combine", failing)
    with eager_device():
        async with Engine.open(toy, settings()) as engine:
            expected = await answers(engine, 1)
            broken.append(True)
            with pytest.raises(StageError, match="caught fire"):
                await answers(engine, 1)
            assert await answers(engine, 1) == expected
            await settled(engine)
            engine._parts.experts.hot_device.store.check_integrity(idle=True)


@pytest.fixture
def captures(monkeypatch):
    """A device whose graphs are its work, computed when it is replayed; what was recorded."""
    recorded = []
    monkeypatch.setattr(DeviceStreams, "can_capture", True)
    monkeypatch.setattr(
        DeviceStreams, "capture", lambda streams, work: recorded.append(work) or work
    )
    return recorded


@pytest.mark.slow
async def test_steps_are_tried_and_captured_when_the_engine_opens(toy, monkeypatch, captures):
    """Every size of a batch is compared, then captured; later steps are replays of it, with the same bits."""
    with compared_steps(monkeypatch) as (steps, use), eager_device():
        async with Engine.open(toy, settings()) as engine:
            at_first = len(captures)
            use(engine)
            await answers(engine, 3)
            await settled(engine)
    assert at_first >= 4
    assert {1, 2} <= {rows for rows, _, _ in steps}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wrong", "raises"])
async def test_a_device_whose_steps_differ_goes_stage_by_stage(
    toy, monkeypatch, captures, caplog, fault
):
    """It adds up other pairs, or can not do it at all: the log says so, and answers are right."""
    combine = handoff_page.naive_gather_combine

    def broken(outputs, pair_of, residual):
        if fault == "raises":
            raise RuntimeError("no kernel image")
        return combine(outputs, torch.zeros_like(pair_of), residual)

    with eager_device():
        async with Engine.open(toy, settings()) as engine:
            expected = await greedy_tokens(engine, PROMPTS[0], NUM_TOKENS)
        monkeypatch.setattr(handoff_page, "naive_gather_combine", broken)
        with caplog.at_level(logging.WARNING):
            async with Engine.open(toy, settings()) as engine:
                assert shared_stage(engine) is None
                assert await greedy_tokens(engine, PROMPTS[0], NUM_TOKENS) == expected
                await settled(engine)
    assert "decode steps are computed stage by stage" in caplog.text
    assert ("comes out differently" if fault == "wrong" else "no kernel image") in caplog.text
