"""Hot experts on a GPU or its stand-in: the same answers as the CPU's, whatever moves, fails, or is not there."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.arch_cases import ARCH_CASES, IS_LONG, SCHEDULED_CASES, of_each_kind
from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.eager_device import eager_device
from tests.support.engine_runs import greedy_tokens, prompt_logits
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    RemoteConfig,
    SchedulerConfig,
    TraceConfig,
)
from thermocline.config import HeatConfig, MemoryConfig
from thermocline.engine import devices as assembly
from thermocline.errors import ConfigError, DeviceFaultError, DeviceMemoryError, DeviceMissingError
from thermocline.experts.backends import gpu as gpu_device
from thermocline.experts.backends import hot_device
from thermocline.experts.backends.gpu import GpuDevice
from thermocline.experts.backends.streamed_device import StreamedDevice
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.models.device import sizes as device_sizes
from thermocline.prefetch.residency import ResidencyProbe
from thermocline.traces.events import SpanEvent
from thermocline.traces.hot_layers import find_hot_layers
from thermocline.traces.jobs import find_plans
from thermocline.traces.lanes import Lane, Name

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 256, 75)]
MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
SHAPE = ToyShape(layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, formats=MIX)
ON_CPU = {"trunk_device": "cpu", "hot_device": "none"}
PLACEMENTS = {
    "half": {"expert_cache": "static", "hot_fraction": 0.5},
    "all": {"expert_cache": "static", "hot_fraction": 1.0},
    "moving": {},
    "small": {"expert_budget_bytes": 700_000},
}

# Seconds each: `make schedules` takes all in both tests, and the suite one of each kind of layer in one of them.
WHOLE = of_each_kind(SCHEDULED_CASES)
HOLDS_ALL, LACKS_SOME = (WHOLE, WHOLE) if IS_LONG else (WHOLE[::2], WHOLE[1::2])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of quantised experts."""
    return write_toy_model(tmp_path_factory.mktemp("gpu") / "toy.gguf", SHAPE)


def settings(*, kernels="reference", trace=False, remote=None, **placement) -> EngineConfig:
    """Reference kernels compute in float32, as the stand-in does."""
    return EngineConfig(
        placement=PlacementConfig(**placement),
        scheduler=SchedulerConfig(prefill_chunk_tokens=32, prefix_cache=False),
        memory=MemoryConfig(kv_type="f32", max_context_tokens=96),
        trace=TraceConfig(enabled=trace),
        remote=remote or RemoteConfig(),
        kernels=kernels,
    )


@pytest.fixture(scope="module")
def on_cpu(path):
    """What the CPU answers alone."""
    return asyncio.run(answers(path, settings(**ON_CPU)))


@pytest.fixture
def stand_in(monkeypatch):
    """A machine whose GPU is torch's CPU."""
    monkeypatch.setattr(assembly, "why_no_gpu", lambda: None)
    monkeypatch.setattr(
        DeviceStreams, "open", classmethod(lambda cls, kind: cls(torch.device("cpu")))
    )


async def answers(path, config: EngineConfig):
    """Return tokens, logits, statistics and the timeline."""
    async with Engine.open(path, config) as engine:
        tokens = await greedy_tokens(engine, PROMPT[:30], 8)
        logits = await prompt_logits(engine, PROMPT)
        assert await greedy_tokens(engine, PROMPT[:30], 8) == tokens
        await settled(engine)
        if engine._parts.experts.hot_device is not None:
            engine._parts.experts.hot_device.ring.check_idle()
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
        return tokens, logits, engine.statistics(), engine.trace_events()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("non_expert", ["cpu", "device"])
async def test_answers_are_those_of_the_cpu(path, on_cpu, device, placement, non_expert):
    """Half or all experts there, or as many as come by use, beside the non-expert weights or without them."""
    expected = on_cpu
    config = settings(
        trace=True,
        hot_device=device,
        trunk_device=device if non_expert == "device" else "cpu",
        **PLACEMENTS[placement],
    )
    with eager_device():
        tokens, logits, statistics, events = await answers(path, config)
    assert tokens == expected[0]
    assert_within(logits, expected[1], "non-expert/whole models")
    store = statistics.store
    assert store.total_hits > 0
    if placement == "all":
        assert store.total_misses == 0
    if placement == "small":
        assert store.resident_bytes <= store.capacity_bytes <= 700_000
    hits, shown = statistics.layer_hits, find_hot_layers(events, find_plans(events))
    assert (shown.num_layers, shown.num_hot) == (hits.total_layers, hits.total_hot_layers)
    assert hits.total_layers == 2 * 7 * SHAPE.layers
    assert placement != "all" or hits.hot_share == 1
    assert placement != "half" or hits.hot_share < 1
    spans = [event for event in events if isinstance(event, SpanEvent)]
    # With the non-expert weights and every expert there, all layers are one job.
    has_all = placement in ("all", "moving")
    name = Name.LAYER if has_all and non_expert == "device" else Name.HOT
    assert any(event.lane is Lane.GPU_COMPUTE and event.name is name for event in spans)
    copies = [event for event in spans if event.lane is Lane.GPU_H2D]
    assert {event.name for event in copies} == {Name.LOAD}
    copies.sort(key=lambda event: event.start_ns)
    for one, other in pairwise(copies):
        assert one.end_ns <= other.start_ns, "copies of one lane overlap"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [700_000, 1_500_000, None])
async def test_a_device_has_experts_before_the_first_request(path, tmp_path, budget):
    """As many as there is room for: spread evenly at first, and once it is known those that are used most."""
    heat = HeatConfig(file=str(tmp_path / "heat"))
    config = replace(settings(hot_device="torch-cpu", expert_budget_bytes=budget), heat=heat)
    with eager_device():
        async with Engine.open(path, config) as engine:
            store = engine._parts.experts.hot_device.store
            first = store.placement()
            hot = [len(experts) for experts in first.hot]
            assert store.statistics().total_uploads == sum(hot) > 0
            assert max(hot) - min(hot) <= 1
            least = min(engine._parts.footprint.expert_bytes)
            room = store.statistics().capacity_bytes - store.statistics().resident_bytes
            assert room < least or sum(hot) == len(hot) * first.num_experts
            if budget is None:
                assert store.is_full
            for text in range(6):
                await greedy_tokens(engine, PROMPT[text : text + 9], 8)
        async with Engine.open(path, config) as engine:
            now = engine._parts.experts.hot_device.store.placement()
            use = engine._parts.experts.initial_placement.known.warmth
    assert now.num_hot == first.num_hot
    for layer, hot in enumerate(now.hot):
        there = np.isin(np.arange(now.num_experts), hot)
        if not there.all():
            assert use[layer, there].min(initial=np.inf) >= use[layer, ~there].max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False])
async def test_pages_in_memory_are_locked_first(path, monkeypatch, locks):
    """Before any expert is copied; those of a file that is not in memory wait until they are used."""
    order = []
    monkeypatch.setattr(DeviceStreams, "lock", lambda *_: order.append("lock") or True)
    begin = GpuDevice.begin_copy
    monkeypatch.setattr(
        GpuDevice,
        "begin_copy",
        lambda self, key, slot, *, urgent=False: (
            order.append("copy") or begin(self, key, slot, urgent=urgent)
        ),
    )
    monkeypatch.setattr(ResidencyProbe, "is_resident", lambda _: locks)
    with eager_device():
        async with Engine.open(path, settings(hot_device="torch-cpu")):
            pass
    assert "copy" in order
    assert (order[0] == "lock") == locks == ("lock" in order)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", HOLDS_ALL, ids=str)
async def test_every_architecture_runs_whole_on_a_device(tmp_path, device, case):
    """The whole model there: several answers at once, recurrent states, windows; then one expert gives way."""
    model = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    # A device rounds operands of prompts to bfloat16: in no case here are the two likeliest tokens that close.
    prompts = [PROMPT[:22], PROMPT[8:43], PROMPT[20:33]]

    async def several(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*(greedy_tokens(engine, each, 6) for each in prompts))

    async with Engine.open(model, settings(**ON_CPU)) as engine:
        expected, logits = await several(engine), await prompt_logits(engine, PROMPT)
        counts = engine.statistics().heat
    config = settings(
        hot_device=device, trunk_device=device, expert_cache="static", hot_fraction=1.0
    )
    async with Engine.open(model, config) as engine:
        assert engine._parts.experts.hot_device.full is not None
        is_square = device == "cuda" and case.name.startswith("nemotron")
        found = await several(engine)
        if is_square:  # rounding moves its logits so far that another token may be the likeliest
            expected = found
        assert found == expected
        entry = "device/whole models that square" if is_square else "non-expert/whole models"
        assert_within(await prompt_logits(engine, PROMPT), logits, entry)
        np.testing.assert_array_equal(engine.statistics().heat.sum(1), counts.sum(1))
        store = engine._parts.experts.hot_device.store
        assert store.statistics().total_misses == 0
        await asyncio.to_thread(store.resize, store.statistics().resident_bytes - 1)
        assert not store.is_full
        assert await several(engine) == expected
        assert store.statistics().total_misses > 0
        await settled(engine)
        store.check_integrity(idle=True)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LACKS_SOME, ids=str)
async def test_prompts_are_computed_whole_on_a_device_that_lacks_experts(
    tmp_path, monkeypatch, device, case
):
    """Experts are copied for each chunk meanwhile, many times what stays: the CPU's answers, and all is counted."""
    model = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    async with Engine.open(model, settings(**ON_CPU)) as engine:
        expected, logits = (
            await greedy_tokens(engine, PROMPT, 6),
            await prompt_logits(engine, PROMPT),
        )
        largest = max(engine._parts.footprint.expert_bytes)
    if device == "torch-cpu":
        monkeypatch.setattr(DeviceStreams, "lock", lambda *_: True)
    monkeypatch.setattr(StreamedDevice, "takes", lambda *_: True)
    monkeypatch.setattr(hot_device, "num_streamed_slots", lambda num_staged: min(num_staged, 4))
    config = settings(
        trace=True, hot_device=device, trunk_device=device, expert_budget_bytes=14 * largest
    )
    async with Engine.open(model, config) as engine:
        hot = engine._parts.experts.hot_device
        assert hot.full is None, "all of its experts fit into so little"
        assert hot.streamed is not None
        found = await greedy_tokens(engine, PROMPT, 6)
        ours = await prompt_logits(engine, PROMPT)
        await settled(engine)
        hot.store.check_integrity(idle=True)
        hot.ring.check_idle()
        counted, events = engine.statistics().store, engine.trace_events()
    is_square = device == "cuda" and case.name.startswith("nemotron")
    assert is_square or found == expected
    entry = "device/whole models that square" if is_square else "non-expert/whole models"
    assert_within(ours, logits, entry)
    assert counted.total_staged > 0 < counted.total_staged_experts
    spans = [event for event in events if isinstance(event, SpanEvent)]
    whole = [one for one in spans if one.lane is Lane.GPU_COMPUTE and one.name is Name.LAYER]
    assert len(whole) == 2 * -(-len(PROMPT) // 32), "every chunk of both prompts is one job"
    loads = sorted((one for one in spans if one.lane is Lane.GPU_H2D), key=lambda one: one.start_ns)
    assert any("experts" in one.args for one in loads)
    for one, other in pairwise(loads):
        assert one.end_ns <= other.start_ns, "copies of one lane overlap"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_experts_of_two_widths_share_a_device(tmp_path, device):
    """Slots of two sizes, layers that use another number of experts, and room for some: the CPU's answer."""
    toy = next(case.toy for case in ARCH_CASES if case.name == "nemotron_h_moe_puzzle")
    model = write_toy_arch(tmp_path / "toy.gguf", toy)
    tokens, logits, _, _ = await answers(model, settings(**ON_CPU))
    config = settings(hot_device=device, trunk_device="cpu", expert_budget_bytes=100_000)
    with eager_device():
        found, ours, statistics, _ = await answers(model, config)
    assert found == tokens
    is_real = device == "cuda"
    entry = "device/whole models that square" if is_real else "non-expert/whole models"
    assert_within(ours, logits, entry)
    store = statistics.store
    assert store.total_hits > 0 < store.total_misses
    assert store.resident_bytes <= store.capacity_bytes <= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("hot", ["none", "device", "simulated"])
async def test_layers_may_use_other_numbers_of_experts(tmp_path, hot):
    """By the native kernels, on a device that computes the rest: each layer by itself, since a step's page has one size."""
    toy = next(case.toy for case in ARCH_CASES if case.name == "nemotron_h_moe_puzzle")
    model = write_toy_arch(tmp_path / "toy.gguf", replace(toy, narrow=0))
    tokens, logits, _, _ = await answers(model, settings(kernels="native", **ON_CPU))
    where = {"hot_device": "torch-cpu" if hot == "device" else hot}
    where["trunk_device"] = "cpu" if hot == "simulated" else "torch-cpu"
    config = settings(kernels="native", expert_cache="static", hot_fraction=0.5, **where)
    with eager_device():
        found, ours, _, _ = await answers(model, config)
    assert found == tokens
    assert_within(ours, logits, "non-expert/whole models")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_a_worker_computes_beside_it(path, device):
    """Three tiers at once: a worker's experts are to the bit those that the CPU would have computed."""
    hot = {
        "hot_device": device,
        "trunk_device": "cpu",
        "expert_cache": "static",
        "hot_fraction": 0.3,
    }
    worker = RemoteConfig(("local:1",), mode="batched")
    expected = await answers(path, settings(kernels="native", **hot))
    tokens, logits, statistics, _ = await answers(
        path, settings(kernels="native", remote=worker, **hot)
    )
    assert tokens == expected[0]
    np.testing.assert_array_equal(logits, expected[1])
    assert statistics.store.total_hits > 0 < statistics.remote.total_choices


@pytest.mark.slow
async def test_experts_of_other_formats_stay_on_the_cpu(tmp_path, stand_in, monkeypatch):
    """Those that a GPU's kernels do not read: a reason where nobody asked, an error where somebody did."""
    monkeypatch.setattr(device_sizes, "DEVICE_FORMATS", frozenset(["Q8_0"]))
    plain = write_toy_model(tmp_path / "plain.gguf", ToyShape(layers=2, used=3))
    async with Engine.open(plain, settings(kernels="native", trunk_device="cpu")) as engine:
        assert len(await greedy_tokens(engine, PROMPT[:5], 3)) == 3
        assert engine.placement_config.hot_device == "none"
        assert "no layer's experts" in engine.statistics().device_reasons[0]
    with pytest.raises(ConfigError, match="--hot-device none"):
        async with Engine.open(plain, settings(hot_device="torch-cpu", trunk_device="cpu")):
            pass


@pytest.mark.slow
async def test_no_room_for_one_expert_is_an_error(path):
    """A budget of a few bytes, asked for, says what is missing."""
    config = settings(hot_device="torch-cpu", trunk_device="cpu", expert_budget_bytes=1000)
    with pytest.raises(DeviceMemoryError, match="no room for an expert"):
        async with Engine.open(path, config):
            pass


@pytest.mark.slow
async def test_a_gpu_that_is_there_is_used_without_being_asked_for(path, stand_in):
    """By default the whole model goes there."""
    async with Engine.open(path, settings(kernels="native")) as engine:
        chosen = engine.placement_config
        assert (chosen.hot_device, chosen.trunk_device) == ("cuda", "cuda")
        assert len(await greedy_tokens(engine, PROMPT[:30], 8)) == 8
        assert engine.statistics().device_reasons == ()


@pytest.mark.slow
async def test_cpu_moe_keeps_experts_and_moves_the_rest(path, stand_in):
    """Only non-expert weights go to a GPU; where there is none, that is said."""
    async with Engine.open(path, settings(kernels="native", cpu_moe=True)) as engine:
        chosen = engine.placement_config
        assert (chosen.hot_device, chosen.trunk_device) == ("none", "cuda")
        assert len(await greedy_tokens(engine, PROMPT[:30], 8)) == 8


async def test_cpu_moe_without_a_gpu_says_so(path, monkeypatch):
    """Nobody asked for a GPU in so many words, but for what it would be used for."""
    monkeypatch.setattr(assembly, "why_no_gpu", lambda: assembly.NO_DRIVER)
    async with Engine.open(path, settings(cpu_moe=True)) as engine:
        assert engine.placement_config.trunk_device == "cpu"
        assert "no GPU's driver" in engine.statistics().device_reasons[0]
    with pytest.raises(ConfigError, match="--hot needs a device"):
        async with Engine.open(path, settings(hot=("0:1",))):
            pass
    async with Engine.open(path, settings()) as engine:
        assert engine.statistics().device_reasons == ()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["non-expert", "experts"])
async def test_a_broken_gpu_that_nobody_asked_for_is_left_alone(
    path, stand_in, monkeypatch, caplog, what
):
    """It computes nonsense, or fails: the CPU answers, and log and statistics say why."""
    expected = await answers(path, settings(kernels="native", **ON_CPU))
    if what == "experts":
        monkeypatch.setattr(
            gpu_device, "naive_expert_outputs", lambda work: torch.zeros(len(work.rows), 256)
        )
    else:
        monkeypatch.setattr(
            assembly,
            "_open_non_expert",
            lambda *_, **__: (_ for _ in ()).throw(RuntimeError("boom")),
        )
    with caplog.at_level(logging.WARNING):
        async with Engine.open(path, settings(kernels="native")) as engine:
            chosen = engine.placement_config
            reasons = engine.statistics().device_reasons
            if what == "experts":
                assert (chosen.hot_device, chosen.trunk_device) == ("none", "cuda")
                assert "come out differently" in reasons[0]
                assert len(await greedy_tokens(engine, PROMPT[:30], 8)) == 8
            else:
                assert chosen.trunk_device == "cpu"
                assert "boom" in reasons[0]
                assert await greedy_tokens(engine, PROMPT[:30], 8) == expected[0]
    assert any("on the CPU: the GPU can not be used" in line for line in caplog.messages)


@pytest.mark.slow
async def test_what_was_asked_for_and_is_broken_is_an_error(path, monkeypatch):
    """No silent other device: experts that come out differently, two devices, or none."""
    monkeypatch.setattr(
        gpu_device, "naive_expert_outputs", lambda work: torch.full((len(work.rows), 256), np.nan)
    )
    for placement in ({}, {"expert_cache": "static"}):
        config = settings(hot_device="torch-cpu", trunk_device="cpu", **placement)
        with pytest.raises(DeviceFaultError, match="--hot-device none"):
            async with Engine.open(path, config):
                pass
    if not torch.cuda.is_available():
        with pytest.raises(DeviceMissingError):
            async with Engine.open(path, settings(hot_device="cuda", trunk_device="cpu")):
                pass
    config = settings(hot_device="cuda", trunk_device="torch-cpu")
    with pytest.raises(ConfigError, match="two devices"):
        async with Engine.open(path, config):
            pass
