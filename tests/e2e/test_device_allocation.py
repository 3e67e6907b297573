"""What a plan says of a device is what the engine's own calls ask of it, byte for byte, for published models."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from click.testing import CliRunner

from benchmarks.published_models.sparse_gguf import write_sparse
from benchmarks.published_models.table import MODELS
from tests.support.accounting_device import accounting_device
from tests.support.arch_cases import SCHEDULED_CASES, of_each_kind
from tests.support.eager_device import eager_device
from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from thermocline import Engine, EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.cli import cli
from thermocline.cli.device_plan import plan_device, planned_device
from thermocline.config import HeatConfig, MemoryConfig
from thermocline.engine.build_context import BuildContext
from thermocline.engine.cache_builder import cpu_cache
from thermocline.engine.devices import open_devices
from thermocline.engine.expert_placement import place_experts
from thermocline.errors import DeviceMemoryError
from thermocline.experts.cache.store import ExpertStore
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.placement.allocation import DeviceAllocation, allocate
from thermocline.experts.placement.wish import device_needs, device_wish
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.messages import ExpertKey
from thermocline.modelfile.reader import open_model_file
from thermocline.models.cache_size import cache_spec
from thermocline.models.prompt_limits import prompt_limits
from thermocline.models.registry import open_model, read_spec
from thermocline.server.app import running_server
from thermocline.traces.recorder import NullRecorder

GIB = 1 << 30
IS_ALL = os.environ.get("THERMOCLINE_ALLOCATIONS") == "all"
NAMES = (
    *("Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "OLMoE-1B-7B", "Qwen3-Next-80B-A3B"),
    *("GLM-4.7-Flash", "Nemotron-3-Nano", "gpt-oss-20b"),
    *(("DeepSeek-V2-Lite",) if IS_ALL else ()),  # as GLM-4.7-Flash
)
EVERY = [
    (gib, context, requests)
    for gib in (6, 8, 12, 16, 24, 48)
    for context in (8192, 32768)
    for requests in (1, 4)
]
CASES = EVERY if IS_ALL else [(12, 32768, 4)]
PARTS = {
    "the last ones": {"gpu_layers": 10},
    "every other": {
        "override_tensor": (r"blk\.\d*[02468]\.(?!ffn_.*_exps)=CPU", "exps=CPU", "^output=CPU")
    },
    "what fits": {},
}
# Each model with one of them, unless all are asked for.
PARTS_OF = [
    (model, part)
    for number, model in enumerate(NAMES)
    for part in (PARTS if IS_ALL else [list(PARTS)[number % len(PARTS)]])
]
TOYS = [case for case in SCHEDULED_CASES if IS_ALL or case.name.startswith("qwen35moe")]
ROOM = 1 << 40


def settings(gib: int, context: int, requests: int, **placement) -> EngineConfig:
    """Return what serve would have, on a device of so many GiB."""
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=context, max_full_contexts=requests),
        placement=PlacementConfig(device_memory_bytes=gib * GIB, **placement),
        scheduler=SchedulerConfig(max_requests=requests),
        heat=HeatConfig(enabled=False),
        kernels="reference",
    )


@pytest.fixture(scope="module", params=NAMES)
def opened(request, tmp_path_factory):
    """One published model: its file, which is a header and a hole, and the model."""
    path = tmp_path_factory.mktemp("published") / "model.gguf"
    with open_model_file(write_sparse(path, MODELS[request.param])) as file:
        kernels = ReferenceKernels()
        yield file, open_model(file, kernels), kernels


def needs_of(file, spec, config):
    """Return what plan and engine decide by."""
    limits = prompt_limits(config, spec, file.total_tensor_bytes, ROOM, on_device=True)
    cache = cache_spec(config, spec, limits)
    return device_needs(file.tensors.values(), spec, cache, limits)


def planned(file, spec, config):
    """Return the plan of a GPU with the config's memory."""
    needs, wished = needs_of(file, spec, config), config.placement
    device = planned_device(wished, f"{wished.device_memory_bytes}B")
    return plan_device(wished, needs, device, None)


def taken_for_experts(allocation: DeviceAllocation) -> int:
    """Return what experts have of memory that is taken with the cache: where they take turns, it is one."""
    return allocation.arena_start if allocation.max_lent_bytes else 0


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "context", "requests"), CASES)
def test_the_engine_takes_what_the_plan_says(opened, gib, context, requests, monkeypatch):
    """The engine's calls for memory add up to the plan's bytes, and its slots hold as many experts."""
    monkeypatch.setattr("thermocline.engine.devices.why_no_gpu", lambda: None)
    monkeypatch.setattr("thermocline.models.device.check.check_non_expert", lambda *_: None)
    file, model, kernels = opened
    spec = model.spec
    config = settings(gib, min(context, spec.context_length), requests)
    plan = planned(file, spec, config)
    # The reference kernels are for this test's speed: by themselves they would leave the GPU alone.
    config = replace(config, kernels="native")
    needs = needs_of(file, spec, config)
    with ExitStack() as owned, eager_device(), accounting_device() as account:
        recorder, kept = NullRecorder(), owned.enter_context(ExitStack())
        devices = open_devices(config, needs, model, kernels, recorder, owned)
        taken, own = account.total_bytes, taken_for_experts(devices.allocation)
        assert (devices.non_expert is not None) == (plan.trunk_layers_on_gpu > 0)
        assert taken - own == pytest.approx(plan.non_expert_bytes + plan.kv_bytes, rel=1e-3)
        limits = prompt_limits(config, spec, file.total_tensor_bytes, ROOM, on_device=True)
        context_ = BuildContext(
            *(config, devices, file, model, kernels, recorder, limits),
            *(SequenceCache(KVPool((), 1, 1)), owned, kept),
        )
        # All slots stay free: gigabytes would be copied.
        filled: list[ExpertKey] = []
        monkeypatch.setattr(ExpertStore, "install", lambda _, keys: filled.extend(keys))
        placed = place_experts(context_, ExpertCatalog(model.expert_layers))
        experts = account.total_bytes - taken + own
        assert placed.devices.placement.hot_device == "cuda", placed.devices.reasons
        store = placed.hot_device.store.statistics()
        assert placed.devices.allocation.slot_bytes == plan.expert_budget_bytes
        assert store.capacity_bytes == plan.expert_bytes_kv_empty
        memory = placed.hot_device.device._memory
        assert sum(map(len, memory._free.values())) == plan.placement.num_hot
        lent = placed.devices.allocation.lent
        hot = enumerate(plan.placement.hot)
        assert {ExpertKey.of(layer, n) for layer, of in hot for n in of} <= {*filled}
        assert len(filled) == plan.placement.num_hot + (lent.num_experts if lent else 0)
        assert sum(map(len, memory._lent_free.values())) == (lent.num_experts if lent else 0)
        assert experts == pytest.approx(plan.staging_bytes + plan.hot_expert_bytes, rel=0.01)
        assert account.total_bytes + plan.workspace_bytes <= gib * GIB


@pytest.mark.slow
@pytest.mark.parametrize(("opened", "name"), PARTS_OF, indirect=["opened"])
def test_the_engine_takes_what_a_plan_of_some_layers_says(opened, name, monkeypatch):
    """The same layers, the same bytes of weights and cache, and the CPU's cache has the places of the others."""
    monkeypatch.setattr("thermocline.engine.devices.why_no_gpu", lambda: None)
    monkeypatch.setattr("thermocline.models.device.check.check_non_expert", lambda *_: None)
    file, model, kernels = opened
    spec = model.spec
    config = settings(12, min(32768, spec.context_length), 1, **PARTS[name])
    needs = needs_of(file, spec, config)
    if name == "what fits":
        whole = planned(file, spec, config)
        limit = (whole.non_expert_bytes + whole.kv_bytes) // 2 + whole.workspace_bytes
        limit += 32 * max(needs.on_device.experts)
        config = replace(config, placement=PlacementConfig(device_memory_bytes=limit))
    plan = planned(file, spec, config)
    config = replace(config, kernels="native")
    with ExitStack() as owned, eager_device(), accounting_device() as account:
        devices = open_devices(config, needs, model, kernels, NullRecorder(), owned)
        part = devices.non_expert.part
        assert (part.layers, part.has_head) == (plan.device_layers, plan.head_on_device)
        assert 0 < len(part.layers) + part.has_head <= spec.num_layers
        taken = plan.non_expert_bytes + plan.kv_bytes
        own = taken_for_experts(devices.allocation)
        assert account.total_bytes - own == pytest.approx(taken, rel=1e-3)
        assert plan.device_bytes + plan.workspace_bytes <= plan.device_bytes_limit
        cache = cpu_cache(devices.cache, spec, devices.device_layers)
    assert cache.num_blocks == devices.cache.num_blocks
    assert (name == "every other") == (plan.hot_expert_bytes == 0)
    keeps = [n for n in range(spec.num_layers) if n not in spec.keyless_layers]
    assert set(cache.kv._layers) == set(keeps) - set(part.layers)


@pytest.mark.parametrize(
    "case", SCHEDULED_CASES if IS_ALL else of_each_kind(SCHEDULED_CASES), ids=str
)
def test_the_device_takes_what_the_plan_says_of_every_architecture(tmp_path, case):
    """Weights with their cache and states, to 1 %. Layers may share a rotary table that the plan counts twice."""
    with open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file:
        kernels = ReferenceKernels()
        model = open_model(file, kernels)
        config = replace(small(None), memory=MemoryConfig(max_context_tokens=64, block_tokens=8))
        needs = needs_of(file, model.spec, config)
        with ExitStack() as owned, accounting_device() as account:
            recorder = NullRecorder()
            devices = open_devices(config, needs, model, kernels, recorder, owned)
            allocation = devices.allocation
            planned_bytes = allocation.non_expert_bytes + allocation.kv_bytes
            tables = needs.on_device.position * 64 if model.spec.window_layers else 0
    assert devices.non_expert.part.is_whole
    assert 0.99 * planned_bytes - tables <= account.total_bytes <= 1.01 * planned_bytes


def test_thirty_billion_on_twelve_gib(tmp_path):
    """With the defaults most of the card is for experts; twice of it holds the whole model."""
    path = write_sparse(tmp_path / "model.gguf", MODELS["Qwen3-30B-A3B"])
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
        found = {}
        for gib in (12, 16, 24):
            config = EngineConfig(placement=PlacementConfig(device_memory_bytes=gib * GIB))
            found[gib] = planned(file, model.spec, config)
    assert found[12].expert_bytes_kv_full == found[12].expert_budget_bytes >= 6.5 * GIB
    assert found[12].expert_bytes_kv_empty >= 9.9 * GIB
    assert found[16].expert_budget_bytes >= 10.5 * GIB
    assert found[24].hot_expert_bytes == found[24].routed_expert_bytes
    assert {plan.trunk_layers_on_gpu for plan in found.values()} == {48}
    assert found[12].kv_contexts == 1


def small(device_memory: int | None) -> EngineConfig:
    """Return settings of torch-cpu with so much memory, and a fixed set of experts."""
    return EngineConfig(
        placement=PlacementConfig(
            trunk_device="torch-cpu",
            hot_device="torch-cpu",
            expert_cache="static",
            hot_fraction=1.0,
            device_memory_bytes=device_memory,
        ),
        memory=MemoryConfig(
            max_context_tokens=64, max_full_contexts=4, kv_type="f32", block_tokens=8
        ),
        scheduler=SchedulerConfig(prefill_chunk_tokens=16, max_requests=16),
        heat=HeatConfig(enabled=False),
        kernels="reference",
    )


def least_memory(needs) -> int:
    """Return the fewest bytes of a device that has the non-expert weights, one context and one expert's upload."""
    low, high = 0, 1 << 34
    while high - low > 1:
        middle = (low + high) // 2
        placement = small(middle).placement
        try:
            allocate(needs.on_device, device_wish(placement, placement, needs, middle))
            high = middle
        except DeviceMemoryError:
            low = middle
    return high


@pytest.mark.slow
@pytest.mark.parametrize("case", TOYS, ids=str)
async def test_a_small_device_serves_more_requests_than_it_has_contexts(tmp_path, case):
    """One context and one expert: requests wait for blocks and states, and are answered as on a large device."""
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(0, 200, n)] for n in (20, 9, 14, 5, 30, 7)]
    with open_model_file(path) as file:
        needs = needs_of(file, read_spec(file), small(None))
    least = least_memory(needs)
    tight = small(least + max(needs.on_device.experts) + 512)

    async def answers(config: EngineConfig) -> tuple[list[list[int]], DeviceAllocation]:
        async with Engine.open(path, config) as engine:
            asked = (greedy_tokens(engine, each, 3) for each in prompts)
            found = list(await asyncio.gather(*asked))
            await settled(engine)
            await engine.check_integrity()
            parts, statistics = engine._parts.experts, engine.statistics()
            assert engine.placement_config.trunk_device == "torch-cpu"
            assert parts.devices.non_expert.num_blocks == parts.devices.cache.num_blocks
            assert statistics.store.capacity_bytes <= statistics.allocation.expert_bytes
            return found, statistics.allocation

    expected, large = await answers(small(None))
    found, allocation = await answers(tight)
    assert (large.num_contexts, allocation.num_contexts) == (4, 1)
    assert allocation.num_staged == 1
    if needs.on_device.state:
        assert allocation.cache.num_live_states == 4 < large.cache.num_live_states == 16
    assert found == expected
    with pytest.raises(DeviceMemoryError, match=r"--ctx.*--device-memory") as caught:
        async with Engine.open(path, small(least - max(needs.on_device.experts) - 1024)):
            pass
    assert caught.value.missing_bytes > 0


async def test_a_device_without_room_is_left_alone_where_nobody_asked(tmp_path, monkeypatch):
    """By default the CPU does what does not fit; the reason says how many bytes are missing, and which flag helps."""
    monkeypatch.setattr("thermocline.engine.devices.why_no_gpu", lambda: None)
    monkeypatch.setattr(
        DeviceStreams, "open", classmethod(lambda cls, kind: cls(torch.device("cpu")))
    )
    path = write_toy_arch(tmp_path / "toy.gguf", SCHEDULED_CASES[0].toy)
    config = EngineConfig(placement=PlacementConfig(device_memory_bytes=1 << 20))
    async with Engine.open(path, config) as engine:
        chosen = engine.placement_config
        assert (chosen.trunk_device, chosen.hot_device) == ("cpu", "none")
        reasons = " ".join(engine.statistics().device_reasons)
        assert "missing" in reasons
        assert "--device-memory" in reasons
        assert len(await greedy_tokens(engine, [1, 2, 3], 3)) == 3


@pytest.mark.slow
def test_plan_and_placement_of_a_server_have_the_same_figures(tmp_path, monkeypatch):
    """/placement of `serve` with some flags, and `plan --json` with the same ones."""
    path = write_toy_arch(tmp_path / "toy.gguf", SCHEDULED_CASES[0].toy)
    flags = ["--trunk-device", "torch-cpu", "--hot-device", "torch-cpu", "--device-memory", "1GiB"]
    ran = CliRunner().invoke(cli, ["plan", str(path), *flags, "--no-measure", "--json"])
    plan = json.loads(ran.stdout)
    bodies = []

    async def serve_once(path, config, server_config, card, on_listening, on_opened):
        async with running_server(path, config, server_config, card) as server:
            on_listening(server.url)
            opened = await server.wait_opened()
            on_opened(opened.engine)
            async with (
                ClientSession(base_url=server.url) as client,
                client.get("/placement") as answer,
            ):
                bodies.append(await answer.json())

    monkeypatch.setattr("thermocline.server.app.serve", serve_once)
    command = ["serve", str(path), "--port", "0", "--explain", *flags, "--no-heat"]
    served = CliRunner().invoke(cli, command)
    assert served.exit_code == 0, served.output
    (body,) = bodies
    tiers = {tier["tier"]: tier for tier in body["tiers"]}
    assert tiers["hot"]["budget_bytes"] == plan["expert_budget_bytes"] > 0
    names = ("non_expert_bytes", "kv_bytes", "kv_contexts", "workspace_bytes", "staging_bytes")
    for name in (*names, "expert_bytes_kv_full", "expert_bytes_kv_empty"):
        assert tiers["trunk"][name] == tiers["hot"][name] == plan[name] > 0, name
    assert tiers["hot"]["device_bytes_limit"] == plan["device_bytes_limit"] == 1 << 30
    chosen = {choice["name"]: choice for choice in body["choices"]}
    assert chosen["non-expert weights"]["bytes"] == plan["non_expert_bytes"]
    assert chosen["KV cache"]["bytes"] == plan["kv_bytes"]
    assert chosen["expert budget"]["bytes"] == plan["expert_budget_bytes"]
    assert chosen["contexts"]["value"] == str(plan["kv_contexts"])
    for choice in body["choices"]:
        assert f"{choice['name']}: {choice['value']}" in served.stderr
        assert choice["why"] in served.stderr
