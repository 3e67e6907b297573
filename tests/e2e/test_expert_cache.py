"""Experts that move between device and CPU while answers are made: not a bit changes, whatever runs out."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.eager_device import FAST_LINK, SLOW_LINK, eager_device
from tests.support.settled import settled
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, SamplingParams, SchedulerConfig
from thermocline.config import SpeculationConfig, TraceConfig
from thermocline.errors import DeviceMemoryError, StageError
from thermocline.traces.events import CounterEvent, InstantEvent, SpanEvent
from thermocline.traces.hot_layers import find_hot_layers
from thermocline.traces.jobs import find_plans
from thermocline.traces.lanes import Lane, Name

SHAPE = ToyShape(layers=2, hidden=64, heads=2, head_dim=32, intermediate=64, used=3, context=160)
PROMPT = [(13 * n + n * n) % 200 for n in range(40)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy_model(tmp_path_factory.mktemp("toy") / "toy.gguf", SHAPE)


def settings(*, trace: bool = False, **placement) -> EngineConfig:
    return EngineConfig(
        placement=PlacementConfig(**placement),
        scheduler=SchedulerConfig(prefix_cache=False),
        # Drafted rows choose experts, too: where choices are counted, each token has one row.
        speculation=SpeculationConfig(drafters="off"),
        trace=TraceConfig(enabled=trace),
    )


async def answer(engine: Engine, prompt=PROMPT, count: int = 24) -> list[object]:
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, logprobs=2)
    found: list[object] = []  # token by token: a slow reader gets merged events
    async for event in engine.generate(prompt, params):
        found += zip(event.token_ids, event.logprobs, strict=True)
    return found


async def alone(toy) -> list[object]:
    async with Engine.open(toy, settings()) as engine:
        return await answer(engine)


async def half_of_all_bytes(toy) -> int:
    async with Engine.open(toy) as engine:
        return engine.footprint.experts_bytes // 2


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("num_answers", [1, 3, 8])
async def test_layers_whose_experts_are_all_hot_are_added_up_there(toy, fraction, num_answers):
    """Every bit stays, the CPU combines the other layers alone, and statistics and timeline count the same."""
    expected = await alone(toy)
    config = settings(
        hot_device="simulated",
        simulated_copy_bytes_per_s=FAST_LINK,
        expert_cache="static",
        hot_fraction=fraction,
        trace=True,
    )
    async with Engine.open(toy, config) as engine:
        found = await asyncio.gather(*(answer(engine) for _ in range(num_answers)))
        await settled(engine)
        hits, events = engine.statistics().layer_hits, engine.trace_events()
        engine._parts.experts.hot_device.store.check_integrity(idle=True)
    assert found == [expected] * num_answers
    plans = find_plans(events)
    shown = find_hot_layers(events, plans)
    assert (shown.num_layers, shown.num_hot) == (hits.total_layers, hits.total_hot_layers)
    combined = [
        event.args["chunk"]
        for event in events
        if isinstance(event, SpanEvent) and event.name is Name.COMBINE
    ]
    if fraction == 1:
        assert not combined
        assert hits.hot_share == 1
    else:
        assert 0 < hits.hot_share < 1
        assert any(plans[chunk].kind == "decode" for chunk in combined)


@pytest.mark.slow
async def test_answers_are_the_same_while_experts_are_promoted_and_evicted(toy):
    """With half the bytes as budget experts come and go during generation; every bit stays."""
    expected = await alone(toy)
    config = settings(
        hot_device="simulated",
        simulated_copy_bytes_per_s=SLOW_LINK,
        expert_budget_bytes=await half_of_all_bytes(toy),
        trace=True,
    )
    with eager_device():
        async with Engine.open(toy, config) as engine:
            for _ in range(4):
                assert await answer(engine) == expected
                assert await answer(engine, PROMPT[::-1])
            await settled(engine)
            store = engine.statistics().store
            events = engine.trace_events()
            engine._parts.experts.hot_device.store.check_integrity(idle=True)
    assert store.total_hits > 0
    assert store.total_uploads > 0
    assert store.total_hits + store.total_staged + store.total_misses == 8 * 2 * 3 * (40 + 23)
    lane = [event for event in events if isinstance(event, SpanEvent | InstantEvent)]
    names = {event.name for event in lane if event.lane is Lane.GPU_H2D}
    assert {Name.LOAD, Name.COPY} <= names
    used = [event for event in events if isinstance(event, CounterEvent)]
    assert any(event.track == Name.RESIDENT_BYTES and event.value > 0 for event in used)


@pytest.mark.slow
async def test_a_cache_without_room_streams_its_experts(toy):
    """With no place to stay, prompts upload through the ring, several at a time, and answers are the same."""
    expected = await alone(toy)
    config = settings(
        hot_device="simulated", simulated_copy_bytes_per_s=FAST_LINK, expert_budget_bytes=0
    )
    with eager_device():
        async with Engine.open(toy, config) as engine:
            assert await answer(engine) == expected
            await settled(engine)
            store = engine.statistics().store
            engine._parts.experts.hot_device.ring.check_idle()
    assert (store.total_uploads, store.num_resident) == (0, 0)
    assert store.total_staged_experts > 16, "more than the ring has slots for"


@pytest.mark.slow
async def test_forced_evictions_during_an_answer_change_nothing(toy):
    """The capacity goes down and up again between tokens."""
    expected = await alone(toy)
    config = settings(hot_device="simulated", expert_cache="static", hot_fraction=1.0)
    async with Engine.open(toy, config) as engine:
        store = engine._parts.experts.hot_device.store
        total = store.statistics().resident_bytes
        found: list[object] = []
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=2)
        async for event in engine.generate(PROMPT, params):
            total = total * 2 // 3
            store.resize(total)
            found += zip(event.token_ids, event.logprobs, strict=True)
        await settled(engine)
        store.check_integrity(idle=True)
        statistics = store.statistics()
    assert found == expected
    assert statistics.total_evictions > 0
    assert statistics.total_hits > 0
    assert statistics.total_misses > 0


@pytest.mark.slow
async def test_memory_that_runs_out_shrinks_the_cache_and_the_answer_goes_on(toy):
    """Another program takes device memory during an answer: experts give way to its activations."""
    expected = await alone(toy)
    config = settings(hot_device="simulated", expert_cache="static", hot_fraction=1.0)
    async with Engine.open(toy, config) as engine:
        device = engine._parts.experts.hot_device.device
        before = engine.statistics().store
        device.limit_memory(before.resident_bytes)
        assert await answer(engine) == expected
        await settled(engine)
        after = engine.statistics().store
        assert await answer(engine) == expected
    assert 0 < after.resident_bytes < before.resident_bytes
    assert after.capacity_bytes < before.capacity_bytes


@pytest.mark.slow
async def test_without_any_memory_one_request_fails_and_the_next_one_runs(toy):
    """Where not even one layer's activations fit, the request ends with what is missing; the next has the CPU."""
    expected = await alone(toy)
    config = settings(hot_device="simulated", expert_cache="static", hot_fraction=1.0)
    async with Engine.open(toy, config) as engine:
        engine._parts.experts.hot_device.device.limit_memory(0)
        with pytest.raises(StageError, match="no room for a layer's activations") as caught:
            await answer(engine)
        assert isinstance(caught.value.__cause__, DeviceMemoryError)
        assert await answer(engine) == expected
        await settled(engine)
        engine._parts.experts.hot_device.store.check_integrity(idle=True)
        assert engine.statistics().store.num_resident == 0


@pytest.mark.slow
async def test_an_honest_thin_link_copies_nothing_and_says_why(toy):
    """Measured costs over a link of 1 MB/s: the CPU computes all, and the reason can be read."""
    config = settings(hot_device="simulated", simulated_copy_bytes_per_s=1e6)
    expected = await alone(toy)
    async with Engine.open(toy, config) as engine:
        for _ in range(3):
            assert await answer(engine) == expected
        await asyncio.to_thread(engine._parts.experts.hot_device.store.promote)
        store = engine.statistics().store
    assert store.total_upload_bytes == 0
    assert store.reason.startswith("nothing is copied")
