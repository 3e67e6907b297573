"""Experts have the cache's memory while requests do not: it comes and goes, and the answers stay what they are."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest

from tests.e2e.test_device_allocation import needs_of
from tests.e2e.test_shared_step_on_device import compared_steps
from tests.support.arch_cases import ARCH_CASES
from tests.support.eager_device import eager_device
from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled, turns
from tests.support.toy_archs import write_toy_arch
from thermocline import Engine, EngineConfig, PlacementConfig, SamplingParams, SchedulerConfig
from thermocline.config import HeatConfig, MemoryConfig
from thermocline.experts.cache import promotion
from thermocline.experts.placement.allocation import allocate, workspace_bytes
from thermocline.experts.placement.wish import device_wish
from thermocline.kv import lending
from thermocline.messages import LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec
from thermocline.stages.shared_model import SharedModelStage

if TYPE_CHECKING:
    from pathlib import Path

ARCHS = ("olmoe", "qwen35moe", "laguna")
CASES = {
    case.toy.arch: case.toy
    for case in ARCH_CASES
    if case.toy.arch in ARCHS and case.name.endswith("_default")
}
CONTEXT, BLOCK = 256, 4
LONG = [(13 * n + n * n) % 200 for n in range(220)]
SHORT = LONG[7:12]


def settings(device_memory: int | None, *, prefix_cache: bool = False, **placement) -> EngineConfig:
    """Return settings of torch-cpu with so much memory; of the CPU alone for None."""
    where = "cpu" if device_memory is None else "torch-cpu"
    wanted = PlacementConfig(
        trunk_device=where,
        hot_device="none" if device_memory is None else where,
        device_memory_bytes=device_memory,
    )
    return EngineConfig(
        placement=replace(wanted, **placement),
        memory=MemoryConfig(max_context_tokens=CONTEXT, kv_type="f32", block_tokens=BLOCK),
        scheduler=SchedulerConfig(
            prefill_chunk_tokens=64, max_requests=8, prefix_cache=prefix_cache
        ),
        heat=HeatConfig(enabled=False),
        kernels="reference",
    )


def tight_memory(path) -> int:
    """Return bytes for the non-expert weights, one context, uploads, and some four experts."""
    with open_model_file(path) as file:
        needs = needs_of(file, read_spec(file), settings(None))
    ample = 1 << 40
    wish = device_wish(settings(ample).placement, settings(ample).placement, needs, ample)
    found, size = allocate(needs.on_device, wish), max(needs.on_device.experts)
    contexts = found.cache.num_blocks - found.cache.min_blocks
    states = found.cache.num_states - 8
    kv = found.kv_bytes - contexts * needs.on_device.block - states * needs.on_device.state
    workspace = workspace_bytes(needs.on_device, needs.chunk_tokens)
    return found.non_expert_bytes + kv + workspace + 8 * size


@dataclass(frozen=True)
class Toy:
    """A model, the memory of a small device, and the answers on the CPU."""

    path: Path
    device_memory: int
    long: list[int]
    short: list[int]


def make_toy(path: Path, arch: str) -> Toy:
    write_toy_arch(path, CASES[arch])

    async def on_cpu() -> list[list[int]]:
        async with Engine.open(path, settings(None)) as engine:
            return [await greedy_tokens(engine, LONG, 4), await greedy_tokens(engine, SHORT, 12)]

    return Toy(path, tight_memory(path), *asyncio.run(on_cpu()))


def test_keys_and_values_that_lie_apart_are_not_lent(tmp_path):
    """Values of another size than keys have a run of memory of their own: a block is no run that could hold an expert."""
    case = next(case for case in ARCH_CASES if case.name == "mimo2_default")
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    limit = tight_memory(path)
    with open_model_file(path) as file:
        needs = needs_of(file, read_spec(file), settings(None))
    placement = settings(limit).placement
    wish, sizes = device_wish(placement, placement, needs, limit), needs.on_device
    assert allocate(sizes, wish).max_lent_bytes == 0
    assert allocate(replace(sizes, splits_blocks=False), wish).max_lent_bytes > 0


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> dict[str, Toy]:
    """A toy of each architecture, by its name."""
    folder = tmp_path_factory.mktemp("toys")
    return {arch: make_toy(folder / f"{arch}.gguf", arch) for arch in ARCHS}


@pytest.fixture
def toy(toys) -> Toy:
    return toys["olmoe"]


@asynccontextmanager
async def opened(toy: Toy, *, kernels: str = "reference", **options):
    """An engine on the small device, where experts move all the time; everything is at rest and whole at the end."""
    no_rest = mock.patch.multiple(promotion, _REST=0.0, _LONG_REST=0.0)
    wanted = replace(settings(toy.device_memory, **options), kernels=kernels)
    with eager_device(), no_rest:
        async with Engine.open(toy.path, wanted) as engine:
            device = engine._parts.experts.hot_device
            yield engine, device
            await settled(engine)
            device.store.check_integrity(idle=True)
            device.ring.check_idle()


def capacities(engine) -> tuple[int, int, int]:
    """Return the experts' bytes while the cache is full, now, and while it is empty."""
    found = engine.statistics()
    full = found.allocation.slot_bytes
    return full, found.store.capacity_bytes, full + found.allocation.lent_expert_bytes


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
async def test_a_long_request_takes_the_room_of_experts_and_gives_it_back(toys, arch, monkeypatch):
    """While it runs experts have what is theirs alone; some chunks later they have the rest again."""
    monkeypatch.setattr(lending, "FREE_CHUNKS", 8)
    toy = toys[arch]
    async with opened(toy) as (engine, device):
        full, now, empty = capacities(engine)
        assert full < now == empty
        assert await greedy_tokens(engine, SHORT, 12) == toy.short
        beside_short = capacities(engine)[1]
        assert full < beside_short
        assert await greedy_tokens(engine, LONG, 4) == toy.long
        beside_long, statistics = capacities(engine)[1], engine.statistics()
        assert full <= beside_long < beside_short
        assert statistics.kv_bytes_lent == device.room.lent_bytes
        assert statistics.store.resident_bytes <= beside_long
        assert await greedy_tokens(engine, SHORT, 12) == toy.short
        assert capacities(engine)[1] == beside_short
        while engine.statistics().store.resident_bytes <= full:
            assert await greedy_tokens(engine, SHORT, 12) == toy.short


@pytest.mark.slow
async def test_long_requests_at_once_and_cancelled_ones_share_what_there_is(toy, monkeypatch):
    """Some that do not fit at once take turns, and one leaves in the middle: the others' answers are the same."""
    monkeypatch.setattr(lending, "FREE_CHUNKS", 4)
    async with opened(toy) as (engine, _):
        leaves = SamplingParams(max_tokens=30, ignore_eos=True)

        async def cancelled() -> None:
            async with aclosing(engine.generate(LONG[::-1], leaves)) as events:
                async for event in events:
                    if event.token_ids:
                        return

        *found, _ = await asyncio.gather(
            *(greedy_tokens(engine, LONG, 4) for _ in range(2)),
            greedy_tokens(engine, SHORT, 12),
            cancelled(),
        )
        assert found == [toy.long] * 2 + [toy.short]
        full, _, empty = capacities(engine)
        for _ in range(3):
            assert await greedy_tokens(engine, SHORT, 12) == toy.short
        assert full < capacities(engine)[1] <= empty


@pytest.mark.slow
async def test_shared_steps_read_lent_slots(toy, monkeypatch):
    """Steps that device and CPU share use experts in the cache's memory, to the bit, and a long request still gets it."""
    monkeypatch.setattr(lending, "FREE_CHUNKS", 4)
    lent_slots = []
    with compared_steps(monkeypatch) as (steps, use):
        compute = SharedModelStage._compute

        def observed(self, step):
            lent_slots.append(int((step.residency >= first_lent).sum()))
            return compute(self, step)

        monkeypatch.setattr(SharedModelStage, "_compute", observed)
        async with opened(toy, kernels="native") as (engine, device):
            use(engine)
            first_lent = min(slots.start for _, slots in device.device._memory._segments)
            for _ in range(4):
                await asyncio.gather(*(greedy_tokens(engine, SHORT, 12) for _ in range(2)))
            empty = capacities(engine)[1]
            before = len(lent_slots)
            await asyncio.gather(greedy_tokens(engine, LONG, 8), greedy_tokens(engine, SHORT, 12))
            assert capacities(engine)[1] < empty
    assert max(lent_slots[:before]) > 0
    assert min(lent_slots[before:]) < max(lent_slots[:before])
    assert any(hot and cold for _, hot, cold in steps)


@pytest.mark.slow
async def test_a_request_waits_for_experts_in_use_and_for_nothing_else(toy):
    """As long as somebody computes with an expert in its way it does not start; then it does, and nothing fails."""
    async with opened(toy) as (engine, device):
        store, segments = device.store, device.room.segments
        lent = [slots for _, slots in device.device._memory._segments]
        first_lent = min(slots.start for slots in lent)
        # The request leaves one segment, whichever: experts of two are in the way of any.
        while True:
            assert await greedy_tokens(engine, SHORT, 12) == toy.short
            rows = [store.residency(LayerIndex(n)) for n in range(len(store.placement().hot))]
            used = {slot for row in rows for slot in row.tolist() if slot >= first_lent}
            if sum(not used.isdisjoint(slots) for slots in lent) > 1:
                break
        leases = []
        for layer, row in enumerate(rows):
            experts = np.flatnonzero(row >= first_lent).astype(np.int32)
            if len(experts):
                yes, counts = np.ones(len(experts), bool), np.ones(len(experts), np.int32)
                leases.append(store.lease(LayerIndex(layer), experts, counts, yes, ~yes)[1])
        asked = asyncio.ensure_future(greedy_tokens(engine, LONG, 4))
        async with asyncio.timeout(30):
            while device.room.until_free() is None:
                await turns(engine, 1)
        await turns(engine, 50)
        assert device.room.until_free() is not None
        assert not asked.done()
        for lease in leases:
            lease.release()
        assert await asked == toy.long
        assert device.room.lending.num_lent < segments.shape.count


@pytest.mark.slow
async def test_prefixes_stay_while_they_are_used_and_lose_to_experts_later(toy, monkeypatch):
    """A prompt that comes again is found; once nobody asked for it during enough chunks, experts have its place."""
    monkeypatch.setattr(lending, "PREFIX_CHUNKS", 20)
    async with opened(toy, prefix_cache=True) as (engine, device):

        async def hits() -> int:
            snapshot = await engine._thread.call(lambda loop: loop.snapshot())
            return snapshot.cache.total_hit_tokens

        for times in range(3):
            assert await greedy_tokens(engine, LONG, 4) == toy.long
            assert await hits() >= times * (len(LONG) // 2)
        lent, found = device.room.lending.num_lent, await hits()
        assert lent < device.room.segments.shape.count
        for other in range(3):
            await greedy_tokens(engine, [other, 3, 4], 12)
        assert device.room.lending.num_lent > lent
        assert await greedy_tokens(engine, LONG, 4) == toy.long
        assert await hits() < found + len(LONG) // 2, "a part of it was lost"


@pytest.mark.slow
@pytest.mark.parametrize("ample", [False, True])
async def test_a_fixed_set_and_a_whole_model_have_memory_of_their_own(toy, ample):
    """Nothing is lent where experts stay where they are, nor where there is room for all of them."""
    options = {} if ample else {"expert_cache": "static", "hot_fraction": 0.25}
    memory = toy.device_memory << ample * 4
    async with Engine.open(toy.path, settings(memory, **options)) as engine:
        assert await greedy_tokens(engine, LONG, 4) == toy.long
        device = engine._parts.experts.hot_device
        assert device.room is None
        assert engine.statistics().kv_bytes_lent == 0
        assert (device.full is not None) == ample
        await settled(engine)
