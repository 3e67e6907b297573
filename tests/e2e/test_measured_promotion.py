"""Promotion follows what the engine measures of a device: no measurement is patched, and speeds lie far apart."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.config import CpuConfig, HeatConfig, MemoryConfig
from thermocline.kernels.cpu_topology import default_threads
from thermocline.kernels.reference import ReferenceKernels

# Whether a device has a core of its own depends on how many threads compute.
pytestmark = pytest.mark.usefixtures("default_threads")
Q8 = dict.fromkeys(("embed", "attn", "gate_up", "down", "output"), "Q8_0")
SMALL = ToyShape(hidden=256, head_dim=64, intermediate=256, used=3, formats=Q8)
WIDE = ToyShape(hidden=256, head_dim=64, intermediate=256, experts=16, used=8, formats=Q8)
HEAVY = ToyShape(hidden=512, head_dim=64, intermediate=512, experts=12, used=12)
PROMPT = [5, 80, 33]
# Of `WIDE`: ten of 32 experts.
BUDGET = 10 * 208_896
MOST_ANSWERS, MOST_OPENINGS = 30, 12
# What a device that is left alone may cost, beside noise: the wrong choice costs five times as much and more.
# The least time of each side tends to what it takes alone, so a few rounds do on a quiet machine.
MAX_RATIO = 1.5
MIN_ROUNDS, MAX_ROUNDS = 5, 60


def settings(device: str, *, kernels: str = "native", threads: int | None = None, **placement):
    return EngineConfig(
        placement=PlacementConfig(trunk_device="cpu", hot_device=device, **placement),
        memory=MemoryConfig(kv_type="f32", max_context_tokens=64),
        scheduler=SchedulerConfig(prefix_cache=False),
        heat=HeatConfig(enabled=False),
        cpu=CpuConfig(threads=threads),
        kernels=kernels,
    )


async def hit_share(engine: Engine, num_tokens: int) -> tuple[float, list[int]]:
    """Return the share of one answer's choices that the device computed, and the tokens."""
    before = engine.statistics().store
    tokens = await greedy_tokens(engine, PROMPT, num_tokens)
    after = engine.statistics().store
    hits = after.total_hits - before.total_hits
    return hits / (hits + after.total_misses - before.total_misses), tokens


@pytest.mark.slow
async def test_a_device_that_pays_gets_what_is_used(tmp_path, monkeypatch):
    """The stand-in of a GPU computes an expert in a fraction of what NumPy's kernels take, which here do all five times."""
    product = ReferenceKernels.matmul

    def slow(*given, **rest):
        return [product(*given, **rest) for _ in range(5)][-1]

    monkeypatch.setattr(ReferenceKernels, "matmul", slow)
    path = write_toy_model(tmp_path / "toy.gguf", WIDE)
    async with Engine.open(path, settings("none", kernels="reference")) as engine:
        expected = await greedy_tokens(engine, PROMPT, 6)
    few = settings("torch-cpu", kernels="reference", expert_budget_bytes=BUDGET)
    async with Engine.open(path, few) as engine:
        first = engine.statistics()
        assert first.placement.num_hot == first.store.num_resident > 0
        assert not first.store.reason
        for _ in range(MOST_ANSWERS):
            share, tokens = await hit_share(engine, 6)
            assert tokens == expected
            assert share > 0
            if engine.statistics().store.total_evictions > 3:
                break
        await settled(engine)
        found = engine.statistics()
        engine._parts.experts.hot_device.store.check_integrity(idle=True)
    assert found.store.total_evictions > 3
    use = np.array(found.heat)
    before, after = (
        sum(use[layer, list(hot)].sum() for layer, hot in enumerate(each.placement.hot))
        for each in (first, found)
    )
    assert after > before, "what came is used less than what went"


@pytest.mark.slow
@pytest.mark.skipif(default_threads() < 2, reason="one processor: no core is left for a device")
async def test_a_simulated_device_on_a_core_of_its_own_gets_experts(tmp_path):
    """A thread beside the CPU's one thread, over a link as fast as a GPU's; answers are the CPU's to the bit."""
    path = write_toy_model(tmp_path / "toy.gguf", HEAVY)
    async with Engine.open(path, settings("none", threads=1)) as engine:
        expected = await greedy_tokens(engine, PROMPT, 12)
    # Beside other programs the device may have no core of its own while it is measured.
    for _ in range(MOST_OPENINGS):
        async with Engine.open(path, settings("simulated", threads=1)) as engine:
            store = engine.statistics().store
            if store.reason:
                continue
            for _ in range(3):
                assert await greedy_tokens(engine, PROMPT, 12) == expected
            await settled(engine)
            store = engine.statistics().store
        if store.total_hits:
            break
    else:
        if os.getloadavg()[0] > 2 * default_threads():
            pytest.skip("other programs leave the device no core")
    assert store.total_uploads > 0
    assert store.total_hits > 0


SLOW = {
    "torch-cpu": settings("torch-cpu", threads=1),
    "slow compute": settings("simulated", threads=1, simulated_slowdown=200.0),
    "no core": settings("simulated", threads=default_threads()),
    "slow link": settings("simulated", threads=1, simulated_copy_bytes_per_s=1e6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
async def test_a_device_that_does_not_pay_is_left_alone(tmp_path, name):
    """Nothing is promoted, a reason says why, and answers take as long as on the CPU alone."""
    path = write_toy_model(tmp_path / "toy.gguf", SMALL)
    least: dict[str, float] = {}
    threads = SLOW[name].cpu.threads

    async def timed(side: str, engine: Engine) -> list[int]:
        start_s = time.perf_counter()
        tokens = await greedy_tokens(engine, PROMPT, 24)
        least[side] = min(least.get(side, 1e9), time.perf_counter() - start_s)
        return tokens

    async with (
        Engine.open(path, settings("none", threads=threads)) as alone,
        Engine.open(path, SLOW[name]) as beside,
    ):
        for number in range(MAX_ROUNDS):
            assert await timed("alone", alone) == await timed("beside", beside)
            # Several threads that wait for each other tell nothing beside other programs.
            is_equal = threads > 1 or least["beside"] <= MAX_RATIO * least["alone"]
            if number >= MIN_ROUNDS and is_equal:
                break
        await settled(beside)
        store = beside.statistics().store
    assert store.total_upload_bytes == store.total_hits == 0
    assert store.reason.startswith("nothing is copied: ")
    assert is_equal, least
