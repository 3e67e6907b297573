"""Engines whose non-expert weights are on a device and whose experts compute on the CPU, against the CPU alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.arch_cases import (
    ARCH_CASES,
    IS_LONG,
    ROUTER_CASES,
    SCHEDULED_CASES,
    of_each_kind,
)
from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.engine_runs import greedy_tokens, prompt_logits
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    PrefetchConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculationConfig,
    TraceConfig,
)
from thermocline.config import MemoryConfig
from thermocline.errors import DeviceFaultError, DeviceMemoryError, StageError
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.models.device.non_expert import DeviceNonExpert
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.lanes import Lane

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 256, 75)]
MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
MIXED = ToyShape(layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, formats=MIX)
PLAIN_CASES = [case for case in ARCH_CASES if case.name.endswith(("_odd", "_default"))]
# The odd one of each architecture that has one: the unit tests compare the layers of all.
ONE_OF_EACH = list({case.toy.arch: case for case in PLAIN_CASES}.values())
SIDE_BY_SIDE = of_each_kind(ONE_OF_EACH)
# Of dense siblings and of those that differ by their routers alone the layers are compared, not the models.
PLAIN = [
    case
    for case in ONE_OF_EACH
    if IS_LONG or (case.toy.experts and case not in ROUTER_CASES) or case.toy.arch == "bailingmoe2"
]


def config(device: str, *, chunk: int = 64, kv_type="f32", blocks: int = 16, **rest):
    """Return settings with reference experts, so that only the arithmetic of non-expert weights differs."""
    return EngineConfig(
        placement=PlacementConfig(**{"trunk_device": device, "hot_device": "none"} | rest),
        scheduler=SchedulerConfig(prefill_chunk_tokens=chunk),
        memory=MemoryConfig(kv_type=kv_type, max_context_tokens=96, block_tokens=blocks),
        kernels="reference",
    )


async def tokens_and_logits(path, settings: EngineConfig, prompt=PROMPT, count: int = 6):
    """Return the answer to the prompt's first half, and logits after all of its tokens."""
    async with Engine.open(path, settings) as engine:
        tokens = await greedy_tokens(engine, prompt[: len(prompt) // 2], count)
        logits = await prompt_logits(engine, prompt)
        await settled(engine)
    return tokens, logits


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", PLAIN, ids=str)
async def test_plain_models_answer_alike(tmp_path, device, case):
    """Every architecture in float32: the same tokens, and logits that differ by the order of additions."""
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    expected = await tokens_and_logits(path, config("cpu"))
    found = await tokens_and_logits(path, config(device))
    assert found[0] == expected[0]
    assert_within(found[1], expected[1], "non-expert/float32")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [None, *of_each_kind(SCHEDULED_CASES)], ids=str)
async def test_quantised_models_agree(tmp_path, device, case):
    """Weights that stay blocks, in every architecture: logits within the tolerance."""
    path = tmp_path / "toy.gguf"
    _ = write_toy_model(path, MIXED) if case is None else write_toy_arch(path, case.toy)
    expected = await tokens_and_logits(path, config("cpu"), PROMPT[:33], 1)
    found = await tokens_and_logits(path, config(device), PROMPT[:33], 1)
    assert_within(found[1], expected[1], "non-expert/whole models")


SQUARING = "device/whole models that square"


def entry_of(device: str, name: str) -> str:
    """Return the tolerance of a model all of whose weights are in float32."""
    if device != "cuda":
        return "non-expert/float32"
    # A GPU's matrix units round what they multiply in prompts.
    return SQUARING if name.startswith("nemotron") else "non-expert/whole models"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "deepseek2_odd",
        "nemotron_h_moe_default",
        "granitehybrid_default",
        "kimi-linear_odd",
        "jamba_odd",
    ],
)
async def test_a_whole_model_there_answers_alike(tmp_path, monkeypatch, device, name):
    """With all experts all layers are one job: latent rows, states, and layers that are one part alone."""
    case = next(case for case in PLAIN_CASES if case.name == name)
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    jobs, compute = [], DeviceNonExpert.all_layers

    def counted(self, chunk, x, experts):
        jobs.append(chunk.num_tokens)
        return compute(self, chunk, x, experts)

    monkeypatch.setattr(DeviceNonExpert, "all_layers", counted)
    expected = await tokens_and_logits(path, config("cpu"), PROMPT[:40])
    hot = {"hot_device": device, "hot_fraction": 1.0, "expert_cache": "static"}
    found = await tokens_and_logits(path, config(device, **hot), PROMPT[:40])
    assert {1, 20, 40} <= {*jobs}
    assert found[0] == expected[0]
    assert_within(found[1], expected[1], entry_of(device, name))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dense", ["gemma4_dense", "granitehybrid_dense"])
async def test_a_dense_model_is_one_job_there(tmp_path, monkeypatch, device, dense):
    """Prompts and steps of a model without experts: no layer of it comes back to the host."""
    case = next(case for case in ARCH_CASES if case.name == dense)
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    jobs: Counter[str] = Counter()
    for name in ("all_layers", "attend_and_route"):

        def counted(self, *args, name=name, compute=DeviceNonExpert.__dict__[name]):
            jobs[name] += 1
            return compute(self, *args)

        monkeypatch.setattr(DeviceNonExpert, name, counted)
    expected = await tokens_and_logits(path, config("cpu"), PROMPT[:40])
    assert not jobs
    async with Engine.open(path, config(device)) as engine:
        jobs.clear()
        tokens = await greedy_tokens(engine, PROMPT[:20], 6)
        logits = await prompt_logits(engine, PROMPT[:40])
    assert tokens == expected[0]
    assert_within(logits, expected[1], entry_of(device, case.name))
    assert jobs["all_layers"] >= 7
    assert not jobs["attend_and_route"]


SCHEDULES = {
    "small chunks": {"chunk": 7},
    "single tokens": {"chunk": 1},
    "small blocks": {"blocks": 3, "chunk": 30},
    "some hot": {"hot_device": "simulated", "hot_fraction": 0.5},
    "all hot": {"hot_device": "cpu", "hot_fraction": 1.0},
    "forced": {"cpu_moe": True, "hot_device": "cpu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("formats", ["plain", "mixed"])
async def test_schedules_and_splits_agree(tmp_path, device, name, formats):
    """Chunk and block sizes, and where experts are, change a result by less than the tolerance."""
    is_plain = formats == "plain"
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(used=3) if is_plain else MIXED)
    prompt = PROMPT if is_plain else PROMPT[:33]
    first, second = (
        replace(config(device, **schedule), kernels="native") for schedule in ({}, SCHEDULES[name])
    )
    expected = await tokens_and_logits(path, first, prompt)
    found = await tokens_and_logits(path, second, prompt)
    assert found[0] == expected[0]
    assert len(set(found[0])) > 2, "a model that repeats one token proves nothing"
    # A last bit may round an operand of a prompt's product the other way.
    assert_within(
        found[1], expected[1], "non-expert/float32" if is_plain else "non-expert/whole models"
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0"])
async def test_every_type_of_cache(tmp_path, device, kv_type):
    """The device's cache holds what the CPU's holds."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(used=3))
    expected = await tokens_and_logits(path, config("cpu", kv_type=kv_type), PROMPT, 1)
    found = await tokens_and_logits(path, config(device, kv_type=kv_type), PROMPT, 1)
    assert_within(found[1], expected[1], "non-expert/whole models")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [None, *SIDE_BY_SIDE], ids=str)
async def test_requests_side_by_side_answer_as_alone(tmp_path, device, case):
    """Native experts, prompts beside answers, shared beginnings, a cache too small for all: the same tokens."""
    path = tmp_path / "toy.gguf"
    _ = write_toy_model(path) if case is None else write_toy_arch(path, case.toy)
    prompts = [PROMPT[:20], PROMPT[:37], [*PROMPT[:37], 5, 4], [9, *PROMPT[:11]], PROMPT[:60]]
    settings = replace(
        config(device, chunk=16, blocks=8),
        kernels="native",
        memory=MemoryConfig(
            kv_type="f32", max_context_tokens=72, block_tokens=8, max_full_contexts=2
        ),
    )
    async with Engine.open(path, settings) as engine:
        alone = [await greedy_tokens(engine, prompt, 8) for prompt in prompts]
        together = await asyncio.gather(
            *(greedy_tokens(engine, prompt, 8) for prompt in prompts * 2)
        )
        await settled(engine)
        for channel in engine.statistics().channels:
            assert channel.peak_depth <= channel.capacity
    assert list(together) == alone * 2


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["laguna", "qwen2moe", "qwen35moe"])
async def test_replayed_steps_answer_alike(tmp_path, monkeypatch, arch):
    """What was recorded of a decode step serves every later one: nothing of the first stays in it."""
    case = next(case for case in PLAIN_CASES if case.name == f"{arch}_default")
    path = write_toy_arch(tmp_path / "toy.gguf", case.toy)
    prompts = [PROMPT[:20], PROMPT[:37], [9, *PROMPT[:11]]]

    recorded, at_opening = [], []

    async def answers() -> list[list[int]]:
        settings = replace(
            config("torch-cpu", blocks=8),
            kernels="native",
            scheduler=SchedulerConfig(prefill_chunk_tokens=64, max_requests=3),
            speculation=SpeculationConfig(drafters="off"),
        )
        async with Engine.open(path, settings) as engine:
            at_opening.append(len(recorded))
            asked = [greedy_tokens(engine, prompt, 12) for prompt in prompts]
            return list(await asyncio.gather(*asked))

    def capture(streams, work):
        recorded.append(work)
        return work

    expected = await answers()
    monkeypatch.setattr(DeviceStreams, "can_capture", True)
    monkeypatch.setattr(DeviceStreams, "capture", capture)
    assert await answers() == expected
    # All of them before the first request: contexts that grow need no others. Of batches of 1, 2 and 4 every layer and the
    # head; of batches of 1, 2, 4 and 8 all layers at once, which are computed beside the CPU.
    assert at_opening == [0, 3 * (case.toy.layers + 1) + 4]
    assert len(recorded) == at_opening[1]


@pytest.mark.slow
async def test_a_whole_model_on_the_device_is_captured_before_requests(
    tmp_path, monkeypatch, caplog
):
    """One graph of all layers for each size of a batch; prompts and answers side by side capture no other."""
    path = write_toy_model(tmp_path / "toy.gguf", MIXED)
    settings = replace(
        config(
            "torch-cpu", blocks=8, hot_device="torch-cpu", hot_fraction=1.0, expert_cache="static"
        ),
        scheduler=SchedulerConfig(prefill_chunk_tokens=16, max_requests=3),
        speculation=SpeculationConfig(drafters="off"),
    )
    prompts = [PROMPT[:20], PROMPT[:37], [9, *PROMPT[:11]]]
    recorded, at_opening, reasons = [], [], []

    async def answers() -> list[list[int]]:
        async with Engine.open(path, settings) as engine:
            at_opening.append(len(recorded))
            reasons.append(" ".join(engine.statistics().device_reasons))
            return list(await asyncio.gather(*(greedy_tokens(engine, each, 6) for each in prompts)))

    def capture(streams, work):
        recorded.append(work)
        return work

    expected = await answers()
    monkeypatch.setattr(DeviceStreams, "can_capture", True)
    monkeypatch.setattr(DeviceStreams, "capture", capture)
    assert await answers() == expected
    # And of the head, for each size.
    assert at_opening == [0, 6]
    assert len(recorded) == 6
    assert "captured" not in reasons[0]
    assert "kernels of experts are compiled" in reasons[1]
    assert "decode steps of up to 4 tokens are 6 captured graphs" in reasons[1]


async def test_a_capture_without_memory_fails_no_request(tmp_path, monkeypatch, caplog):
    """Decode steps go on without a graph; each size of a batch is tried once and logged, when the engine opens."""
    path = write_toy_model(tmp_path / "toy.gguf")
    settings = replace(
        config("torch-cpu"),
        scheduler=SchedulerConfig(max_requests=2),
        speculation=SpeculationConfig(drafters="off"),
    )

    async def answers() -> list[list[int]]:
        async with Engine.open(path, settings) as engine:
            return [await greedy_tokens(engine, PROMPT[:20], 8) for _ in range(2)]

    tried = []

    def capture(streams, work):
        tried.append(work)
        raise torch.OutOfMemoryError("tried to allocate 1 GiB. There is none")

    expected = await answers()
    monkeypatch.setattr(DeviceStreams, "can_capture", True)
    monkeypatch.setattr(DeviceStreams, "capture", capture)
    assert await answers() == expected
    # Layers of each size of a batch, and the head.
    lines = [f"steps of {rows} tokens run without a captured graph" for rows in (2, 1)]
    lines.insert(1, "logits are computed without a captured graph")
    assert len(tried) == len(lines)
    for text, line in zip(lines, caplog.messages, strict=True):
        assert text in line


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_cancelled_requests_leave_nothing(tmp_path, device):
    """Ended at any point of the ring or of a walk; the next one is answered as before."""
    path = write_toy_model(tmp_path / "toy.gguf")
    async with Engine.open(path, config(device, chunk=8)) as engine:
        expected = await greedy_tokens(engine, PROMPT[:30], 4)
        for rounds in range(30):
            task = asyncio.create_task(greedy_tokens(engine, PROMPT[: 10 + rounds], 30))
            for _ in range(rounds * 3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await settled(engine)
        assert await greedy_tokens(engine, PROMPT[:30], 4) == expected


@pytest.mark.parametrize("device", DEVICES)
async def test_memory_that_runs_out_fails_one_request(tmp_path, device, monkeypatch):
    """The request that it happened to is told the fix; the one after it is answered."""
    path = write_toy_model(tmp_path / "toy.gguf")
    async with Engine.open(path, config(device)) as engine:
        expected = await greedy_tokens(engine, PROMPT[:20], 4)

        def full(*args, **rest):
            raise torch.OutOfMemoryError("tried to allocate 1 GiB. There is none")

        with monkeypatch.context() as broken:
            broken.setattr("thermocline.kernels.gpu.layer.attention", full)
            with pytest.raises(StageError, match=r"tried to allocate 1 GiB.*--ctx") as caught:
                await greedy_tokens(engine, PROMPT[:30], 4)
        assert isinstance(caught.value.__cause__, DeviceMemoryError)
        assert await greedy_tokens(engine, PROMPT[:20], 4) == expected
        await settled(engine)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_device_that_dies_ends_the_engine(tmp_path, monkeypatch, dies):
    """Every request, running or later, is told that the device is gone; any other error fails one request alone."""
    path = write_toy_model(tmp_path / "toy.gguf")
    broken = []

    def failing(*args, **rest):
        broken.append(True)
        raise RuntimeError("CUDA error: unspecified launch failure")

    def probe(streams) -> None:
        if dies and broken:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(DeviceStreams, "_probe", probe)
    async with Engine.open(path, config("torch-cpu")) as engine:
        expected = await greedy_tokens(engine, PROMPT[:20], 4)
        with monkeypatch.context() as context:
            context.setattr("thermocline.kernels.gpu.layer.attention", failing)
            asked = [greedy_tokens(engine, PROMPT[: 20 + n], 4) for n in range(3)]
            failures = await asyncio.gather(*asked, return_exceptions=True)
        if not dies:
            assert {type(failure) for failure in failures} == {StageError}
            assert await greedy_tokens(engine, PROMPT[:20], 4) == expected
            return
        assert {type(failure) for failure in failures} == {DeviceFaultError}
        await asyncio.to_thread(engine._thread.join)
        assert not engine.is_running
        with pytest.raises(DeviceFaultError, match=r"unspecified launch failure.*open the engine"):
            await greedy_tokens(engine, PROMPT[:20], 4)


@pytest.mark.parametrize("device", DEVICES)
async def test_the_trace_shows_the_device_at_work(tmp_path, device):
    """Attention and head have the device's lane, experts the CPU's; both count as lanes of the engine."""
    path = write_toy_model(tmp_path / "toy.gguf")
    settings = replace(
        config(device),
        trace=TraceConfig(enabled=True),
        prefetch=PrefetchConfig(mode="off"),
        kernels="native",
    )
    async with Engine.open(path, settings) as engine:
        await greedy_tokens(engine, PROMPT[:10], 3)
        engine.save_trace(tmp_path / "trace.json")
        assert [lane.lane for lane in engine._parts.lanes] == [Lane.CPU, Lane.GPU_COMPUTE]
    lanes_of: dict[str, set[Lane]] = {}
    for event in read_chrome(tmp_path / "trace.json").events:
        if type(event).__name__ == "SpanEvent":
            lanes_of.setdefault(str(event.name), set()).add(event.lane)
    assert lanes_of["attend"] == lanes_of["head"] == {Lane.GPU_COMPUTE}
    assert lanes_of["embed"] == lanes_of["cold"] == {Lane.CPU}
    assert "router" not in lanes_of
    # Of the answer's steps, which are one job of the device.
    assert lanes_of["layer"] == {Lane.GPU_COMPUTE}


async def test_experts_forced_to_the_cpu_need_no_gpu(tmp_path):
    """--cpu-moe takes a GPU for non-expert weights if there is one, and leaves no expert hot."""
    path = write_toy_model(tmp_path / "toy.gguf")
    settings = EngineConfig(placement=PlacementConfig(cpu_moe=True, hot_device="cpu"))
    async with Engine.open(path, settings) as engine:
        await greedy_tokens(engine, PROMPT[:10], 3)
        assert engine.statistics().hot_share == 0.0
        has_device = Lane.GPU_COMPUTE in [lane.lane for lane in engine._parts.lanes]
    assert has_device == torch.cuda.is_available()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_a_next_turn_goes_on_from_a_snapshot(tmp_path, device):
    """Recurrent states on the device are shared, saved and begun with as on the CPU."""
    hybrid = next(case for case in ARCH_CASES if case.name == "qwen35moe_default")
    path = write_toy_arch(tmp_path / "toy.gguf", hybrid.toy)
    settings = config(device, chunk=24, blocks=8)
    async with Engine.open(path, config("cpu", chunk=24, blocks=8)) as engine:
        expected = [await greedy_tokens(engine, PROMPT[:n], 5) for n in (41, 60)]
    async with Engine.open(path, settings) as engine:
        found = [await greedy_tokens(engine, PROMPT[:n], 5) for n in (41, 60)]
        assert (await engine.snapshot()).cache.total_hit_tokens == 40
        again = await greedy_tokens(engine, PROMPT[:60], 5)
        await settled(engine)
    assert found == expected
    assert again == expected[1]


def test_a_prompt_on_the_device_leaves_sampling_as_it_is(tmp_path):
    """Seeded answers are the CPU's: only logits come from the device."""

    async def answer(device: str) -> list[int]:
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
        tokens: list[int] = []
        async with Engine.open(path, config(device)) as engine:
            async for event in engine.generate(PROMPT[:20], params):
                tokens += event.token_ids
        return tokens

    path = write_toy_model(tmp_path / "toy.gguf")
    assert asyncio.run(answer("torch-cpu")) == asyncio.run(answer("cpu"))
