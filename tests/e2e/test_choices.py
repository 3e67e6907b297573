"""What an engine says of its choices is what its parts do."""

from __future__ import annotations

import pytest

from tests.support.engine_runs import greedy_tokens
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.config import CpuConfig, HeatConfig, MemoryConfig, PrefetchConfig
from thermocline.engine import devices
from thermocline.engine.cpu import multiplies_on_tiles
from thermocline.kernels.cpu_topology import default_threads

pytestmark = pytest.mark.usefixtures("default_threads")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy_model(tmp_path_factory.mktemp("toy") / "toy.gguf", ToyShape(context=4096))


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: devices.NO_DRIVER)


async def choices(path, **sections):
    """Return the choices by name; each has a reason."""
    config = EngineConfig(heat=HeatConfig(enabled=False), **sections)
    async with Engine.open(path, config) as engine:
        await greedy_tokens(engine, [1, 2, 3], 2)
        found = {choice.name: choice for choice in engine.choices()}
        assert all(choice.why for choice in found.values())
        return found, engine


async def test_without_flags_everything_has_a_reason(toy):
    """On a machine without a GPU: the CPU's threads and kernels, and why nothing is on a device."""
    found, engine = await choices(toy)
    footprint = engine.footprint
    assert found["threads"].value == str(default_threads())
    assert found["threads"].why == "one per processor that may be used"
    assert f"{found['instruction set'].value} x {found['threads'].value}" == engine.kernels_name
    assert str(found["non-expert weights"]).startswith("non-expert weights: on cpu, ")
    assert found["non-expert weights"].nbytes == footprint.trunk_bytes
    assert found["non-expert weights"].why == found["hot experts"].why == devices.NO_DRIVER
    assert found["cold experts"].nbytes == footprint.experts_bytes
    assert (found["KV type"].value, found["KV type"].why) == ("f16", "the default")
    assert (found["contexts"].value, found["context"].value) == ("64", "4096 tokens")
    tokens = 2048 if multiplies_on_tiles(EngineConfig()) else 1024
    assert found["prompt chunk"].value == f"{tokens} tokens"
    assert found["prompt chunks in flight"].value == "1"
    assert found["prefetch"].value.startswith("auto")
    assert found["an answer's token"].value in ("FusedStep", "FusedLayer", "Sequential")
    assert not {"promotion", "uploads", "expert budget"} & found.keys()


async def test_what_was_asked_for_is_said_to_be(toy):
    """Each flag that decided is named."""
    found, _ = await choices(
        toy,
        cpu=CpuConfig(isa="portable", threads=1),
        memory=MemoryConfig(kv_type="f32", max_context_tokens=256),
        scheduler=SchedulerConfig(prefill_chunk_tokens=64, max_prompt_chunks=3),
        prefetch=PrefetchConfig("off"),
        placement=PlacementConfig(trunk_device="cpu", hot_device="none"),
    )
    flags = {
        "threads": ("1", "--threads"),
        "instruction set": ("portable", "--cpu-isa"),
        "KV type": ("f32", "--kv-type"),
        "context": ("256 tokens", "--ctx"),
        "prompt chunk": ("64 tokens", "--prefill-chunk"),
        "prompt chunks in flight": ("3", "--prompt-chunks"),
        "prefetch": ("off", "--prefetch"),
        "non-expert weights": ("on cpu", "--trunk-device"),
        "hot experts": ("none", "--hot-device"),
    }
    for name, (value, flag) in flags.items():
        assert (found[name].value, found[name].why) == (value, f"asked for ({flag})")
    assert found["an answer's token"].value == "FusedStep"


async def test_a_device_tells_what_promotion_waits_for(toy):
    """A thin link: no promotion and no upload, by what was measured; a fixed set: as it was placed."""
    thin = PlacementConfig(hot_device="simulated", simulated_copy_bytes_per_s=1e6)
    found, _ = await choices(toy, placement=thin)
    assert found["promotion"].value == found["uploads"].value == "off"
    assert found["promotion"].why.startswith("nothing is copied: ")
    assert found["expert budget"].nbytes < thin.simulated_memory_bytes
    fixed = PlacementConfig(hot_device="simulated", expert_cache="static")
    found, engine = await choices(toy, placement=fixed)
    assert found["hot experts"].value == "8 of 16 on simulated"
    assert found["hot experts"].nbytes + found["cold experts"].nbytes == (
        engine.footprint.experts_bytes
    )
    assert found["promotion"].why == found["uploads"].why == "experts stay where they were placed"
