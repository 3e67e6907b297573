"""Engines with some layers' non-expert weights on a device and the others' on the CPU, against the CPU alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.arch_cases import ARCH_CASES
from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.eager_device import eager_device
from tests.support.engine_runs import greedy_tokens, prompt_logits
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, SchedulerConfig, TraceConfig
from thermocline.config import HeatConfig, MemoryConfig
from thermocline.errors import ConfigError
from thermocline.experts.backends.gpu import GpuDevice
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.lanes import Lane

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 256, 75)]
CASES = {case.name: case for case in ARCH_CASES}
# A plain architecture, some with recurrent layers, windows, latent rows: their kinds of layers are on both sides.
PARTS = {
    "olmoe_default": {"gpu_layers": 2},
    "qwen35moe_odd": {"gpu_layers": 4},
    "laguna_default": {"override_tensor": (r"blk\.[024]\.(?!ffn_.*_exps)=CPU,^output=CPU",)},
    "deepseek2_lite": {"gpu_layers": 2},
    "lfm2moe_default": {"gpu_layers": 3},
    "nemotron_h_moe_default": {"gpu_layers": 6},
    "granitehybrid_default": {"gpu_layers": 3},
    "jamba_default": {"gpu_layers": 3},
    "kimi-linear_default": {"gpu_layers": 4},
}
# One of each kind of memory.
SIDE_BY_SIDE = ("olmoe_default", "qwen35moe_odd", "laguna_default", "deepseek2_lite")
PLACES = {
    "olmoe_default": ((2,), True),
    "qwen35moe_odd": ((2, 3, 4), True),
    "laguna_default": ((1, 3), False),
    "deepseek2_lite": ((2,), True),
    "lfm2moe_default": ((2, 3), True),
    "nemotron_h_moe_default": ((2, 3, 4, 5, 6), True),
    "granitehybrid_default": ((2, 3), True),
    "jamba_default": ((2, 3), True),
    "kimi-linear_default": ((2, 3, 4), True),
}


def config(device: str, *, chunk: int = 24, contexts: int = 4, kernels="reference", **placement):
    """Return settings of a device without experts; reference kernels compute in float32, as it does."""
    return EngineConfig(
        placement=PlacementConfig(**({"trunk_device": device, "hot_device": "none"} | placement)),
        scheduler=SchedulerConfig(prefill_chunk_tokens=chunk),
        memory=MemoryConfig(
            kv_type="f32", max_context_tokens=64, block_tokens=8, max_full_contexts=contexts
        ),
        heat=HeatConfig(enabled=False),
        kernels=kernels,
    )


async def tokens_and_logits(path, settings: EngineConfig, count: int = 33):
    """Return an answer, logits after each of `count` tokens, and what is on the device."""
    async with Engine.open(path, settings) as engine:
        tokens = await greedy_tokens(engine, PROMPT[:20], 5)
        logits = await prompt_logits(engine, PROMPT[:count])
        await settled(engine)
        return tokens, logits, engine.statistics().allocation


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PARTS)
async def test_some_layers_there_answer_as_none(tmp_path, device, name):
    """The same tokens, and logits that differ by the order of additions."""
    path = write_toy_arch(tmp_path / "toy.gguf", CASES[name].toy)
    expected = await tokens_and_logits(path, config("cpu"))
    found = await tokens_and_logits(path, config(device, **PARTS[name]))
    assert (found[2].part.layers, found[2].part.has_head) == PLACES[name]
    assert found[0] == expected[0]
    assert len(set(found[0])) > 2, "a model that repeats one token proves nothing"
    assert_within(found[1], expected[1], "non-expert/float32")


async def test_no_layer_there_changes_no_bit(tmp_path):
    """--gpu-layers 0 opens no device."""
    path = write_toy_model(tmp_path / "toy.gguf")
    expected = await tokens_and_logits(path, config("cpu"), 9)
    found = await tokens_and_logits(path, config("auto", gpu_layers=0), 9)
    assert found[2] is None
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.slow
async def test_where_experts_are_changes_no_bit(tmp_path):
    """Layers on both sides, experts on the CPU or on a second device with the CPU's kernels: the same bits."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(layers=3, used=3))
    part = config("torch-cpu", gpu_layers=2)
    hot = replace(part.placement, hot_device="simulated", expert_cache="static")
    expected = await tokens_and_logits(path, part)
    found = await tokens_and_logits(path, replace(part, placement=hot))
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
async def test_requests_side_by_side_share_one_block_table(tmp_path, device, name):
    """Shared beginnings, snapshots, windows, and a cache too small for all: each side's blocks are its own layers'."""
    path = write_toy_arch(tmp_path / "toy.gguf", CASES[name].toy)
    prompts = [PROMPT[:37], [*PROMPT[:37], 5, 4], [9, *PROMPT[:11]]]
    common = {"contexts": 1, "kernels": "native"}
    async with Engine.open(path, config("cpu", **common)) as engine:
        expected = [await greedy_tokens(engine, prompt, 4) for prompt in prompts]
    async with Engine.open(path, config(device, **common, **PARTS[name])) as engine:
        together = await asyncio.gather(*(greedy_tokens(engine, prompt, 4) for prompt in prompts))
        again = [await greedy_tokens(engine, prompt, 4) for prompt in reversed(prompts)]
        await settled(engine)
        await engine.check_integrity()
        assert (await engine.snapshot()).cache.total_hit_tokens > 0
        for channel in engine.statistics().channels:
            assert channel.peak_depth <= channel.capacity
    assert list(together) == expected == again[::-1]


@pytest.mark.parametrize("device", DEVICES)
async def test_the_trace_shows_both_sides(tmp_path, device):
    """Layers attend on the lane of their side, and the head computes where it is."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(layers=3))
    settings = replace(config(device, gpu_layers=2), trace=TraceConfig(enabled=True))
    async with Engine.open(path, settings) as engine:
        await greedy_tokens(engine, PROMPT[:10], 2)
        engine.save_trace(tmp_path / "trace.json")
    events = read_chrome(tmp_path / "trace.json").events
    spans = [event for event in events if type(event).__name__ == "SpanEvent"]
    lanes = {
        (str(span.name), span.args.get("layer")): span.lane
        for span in spans
        if span.name in ("attend", "head")
    }
    cpu, gpu = Lane.CPU, Lane.GPU_COMPUTE
    assert [lanes["attend", layer] for layer in range(3)] == [cpu, cpu, gpu]
    assert lanes["head", None] == gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ({"cpu_moe": True}, set()),
        ({"n_cpu_moe": 2}, {2}),
        ({"override_tensor": (r"blk\.[02]\.ffn_.*_exps=CPU",)}, {1}),
        ({"override_tensor": (r"blk\.1\.ffn_.*_exps=CUDA0,exps=CPU",)}, {1}),
    ],
)
async def test_experts_that_are_kept_away_never_come(tmp_path, monkeypatch, flags, layers):
    """Neither at the start, nor by promotion, nor for one chunk: a device whose use always pays gets none of them."""
    shape = ToyShape(layers=3, formats={"gate_up": "Q8_0", "down": "Q8_0"})
    path = write_toy_model(tmp_path / "toy.gguf", shape)
    copied = set()
    begin_copy = GpuDevice.begin_copy

    def noted(self, key, slot, *, urgent=False):
        copied.add((int(key.layer), urgent))
        return begin_copy(self, key, slot, urgent=urgent)

    monkeypatch.setattr(GpuDevice, "begin_copy", noted)
    placement = {"hot_device": "torch-cpu", "expert_budget_bytes": 60_000} | flags
    settings = config("cpu", chunk=64, **placement)
    with eager_device():
        async with Engine.open(path, settings) as engine:
            for _ in range(2):
                await greedy_tokens(engine, PROMPT[:50], 6)
            device = engine._parts.experts.hot_device
            if device is not None:
                await asyncio.to_thread(device.store.promote)
    assert {layer for layer, _ in copied} == layers
    if layers == {2}:
        assert {urgent for _, urgent in copied} == {True, False}, "nothing was uploaded or promoted"


async def test_by_default_a_small_device_has_as_many_layers_as_fit(tmp_path, monkeypatch):
    """They are tried as a whole device is, the reason names what is missing, and the answers are the CPU's."""
    monkeypatch.setattr("thermocline.engine.devices.why_no_gpu", lambda: None)
    stand_in = classmethod(lambda cls, kind: cls(torch.device("cpu")))
    monkeypatch.setattr(DeviceStreams, "open", stand_in)
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(layers=3))

    def small(device_memory: int) -> EngineConfig:
        placement = {"cpu_moe": True, "device_memory_bytes": device_memory}
        return config("auto", hot_device="auto", contexts=1, kernels="native", **placement)

    expected = await tokens_and_logits(path, config("cpu", kernels="native"), 9)
    _, _, whole = await tokens_and_logits(path, small(1 << 30), 9)
    limit = whole.workspace_bytes + (whole.non_expert_bytes + whole.kv_bytes) // 2
    async with Engine.open(path, small(limit)) as engine:
        statistics = engine.statistics()
        part, chosen = statistics.allocation.part, engine.placement_config
        tokens = await greedy_tokens(engine, PROMPT[:20], 5)
        await settled(engine)
    assert whole.part.is_whole
    assert (part.layers, part.has_head, chosen.trunk_device) == ((2,), True, "cuda")
    assert "non-expert weights of 2 layers on the CPU" in statistics.device_reasons[0]
    assert "missing for the whole trunk" in statistics.device_reasons[0]
    assert tokens == expected[0]


async def test_flags_that_exclude_each_other(tmp_path):
    """An error before anything is loaded, with the flag to leave out."""
    path = write_toy_model(tmp_path / "toy.gguf")
    for placement, says in (
        ({"trunk_device": "cpu", "gpu_layers": 1}, "--trunk-device cpu .*--gpu-layers"),
        ({"trunk_device": "torch-cpu", "gpu_layers": 0}, "exclude each other"),
        ({"override_tensor": ("exps=CUDA0",)}, "--hot-device none"),
        ({"override_tensor": ("attn=CPU",)}, "what can be placed"),
    ):
        with pytest.raises(ConfigError, match=says):
            async with Engine.open(path, config("auto", **placement)):
                pass
    with pytest.raises(ConfigError, match="--gpu-layers is -1"):
        PlacementConfig(gpu_layers=-1)
