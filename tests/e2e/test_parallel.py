"""One model on several ranks: the same tokens as in one process, also after ranks were lost.

Ranks are threads here, with groups in memory; `tests/reliability/test_ranks.py` has them as processes of torchrun.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.thread_ranks import ThreadWorld, followed
from tests.support.toy_archs import write_toy_arch
from thermocline.config import (
    EngineConfig,
    HeatConfig,
    MemoryConfig,
    ParallelConfig,
    PlacementConfig,
    RemoteConfig,
    SchedulerConfig,
)
from thermocline.engine import mesh_builder
from thermocline.engine.api import Engine
from thermocline.errors import ConfigError, MeshError
from thermocline.experts.dispatch.offload_selector import OffloadSelector
from thermocline.experts.heat import HeatRecord
from thermocline.experts.heat_file import identify, write_heat
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec

pytestmark = pytest.mark.slow

IS_WHOLE = "THERMOCLINE_PARALLEL" in os.environ
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]
CASES = [case for case in ARCH_CASES if case.toy.experts]
BY_NAME = {case.name: case for case in CASES}


def config_of(dp: int, tp: int, **parallel: object) -> EngineConfig:
    """Return the config of small ranks. Prompts take several chunks."""
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=128),
        placement=PlacementConfig(hot_device="none", trunk_device="cpu"),
        heat=HeatConfig(enabled=False),
        scheduler=SchedulerConfig(prefill_chunk_tokens=16),
        parallel=ParallelConfig(
            dp=dp,
            tp=tp,
            num_ranks=dp * tp,
            **({"timeout_s": 5.0, "may_compute_alone": False} | parallel),
        ),
    )


PROMPTS = [[5, 9, 2], list(range(3, 48)), [7], [7, 7, 7, 7, 7, 7, 7], list(range(60, 80))]


async def answers(path: object, config: EngineConfig, count: int = 9) -> list[list[int]]:
    """Return the greedy answers to all prompts, asked at once."""
    async with Engine.open(path, config) as engine:

        async def one(prompt: list[int]) -> list[int]:
            events = engine.generate(prompt, max_tokens=count, ignore_eos=True)
            return [token async for event in events for token in event.token_ids]

        return await asyncio.gather(*map(one, PROMPTS))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return the file of a case, and its answers in one process."""
    made: dict[str, tuple[object, list[list[int]]]] = {}

    def make(name: str) -> tuple[object, list[list[int]]]:
        if name not in made:
            path = tmp_path_factory.mktemp("ranks") / f"{name}.gguf"
            write_toy_arch(path, BY_NAME[name].toy)
            config = EngineConfig(
                **{
                    field: getattr(config_of(1, 1), field)
                    for field in ("memory", "placement", "heat")
                }
            )
            made[name] = path, asyncio.run(answers(path, config))
        return made[name]

    return make


def on_ranks(world: ThreadWorld, path: object, config: EngineConfig, monkeypatch) -> list:
    """Return the answers of several ranks."""
    with followed(world, path, config, monkeypatch) as mine:
        return asyncio.run(answers(path, mine))


@pytest.mark.parametrize("kind", ["leader", "sequence", "naive"])
@pytest.mark.parametrize(("dp", "tp"), MESHES if IS_WHOLE else [(2, 2), (4, 1), (1, 2)])
def test_answers_are_those_of_one_process(dp, tp, kind, model_of, monkeypatch):
    """Whoever dispatches, and however many replicas there are: token for token."""
    path, expected = model_of(CASES[0].name)
    world = ThreadWorld(5.0)
    assert on_ranks(world, path, config_of(dp, tp, exchange=kind), monkeypatch) == expected


# The first case of each, unless all were asked for.
EVERY = [case.name for case in CASES]
FIRST = list({case.toy.arch: case.name for case in reversed(CASES)}.values())


@pytest.mark.parametrize("name", EVERY if IS_WHOLE else FIRST)
def test_every_architecture_answers_alike_on_two_ranks(name, model_of, monkeypatch):
    """Sliding windows, recurrent states, shared experts and norms behind experts included."""
    path, expected = model_of(name)
    assert on_ranks(ThreadWorld(5.0), path, config_of(2, 1), monkeypatch) == expected


@pytest.mark.parametrize("payload", ["f16", "bf16"])
def test_halves_on_the_way_give_answers_too(payload, model_of, monkeypatch):
    """Half the bytes, not the same bits: every answer has its length."""
    path, expected = model_of(CASES[0].name)
    config = config_of(2, 1, payload=payload)
    found = on_ranks(ThreadWorld(5.0), path, config, monkeypatch)
    assert [len(answer) for answer in found] == [len(answer) for answer in expected]


RECURRENT = next(case.name for case in CASES if case.toy.arch in {"qwen3next", "qwen35moe"})


@pytest.mark.parametrize(
    ("dp", "tp", "deaths"),
    [
        *((2, 1, {1: after}) for after in ((25, 40, 77, 110) if IS_WHOLE else (40,))),
        (3, 1, {1: 30, 2: 90}),
        (2, 2, {1: 35}),
        (2, 2, {2: 30, 3: 31}),
    ],
)
@pytest.mark.parametrize("name", [CASES[0].name, RECURRENT])
def test_answers_are_the_same_after_ranks_were_lost(
    dp, tp, deaths, name, model_of, monkeypatch, caplog
):
    """Those that are left compute the lost experts, and a lost replica's requests from their tokens."""
    path, expected = model_of(name)
    world = ThreadWorld(5.0, deaths)
    config = config_of(dp, tp, timeout_s=1.0)
    assert on_ranks(world, path, config, monkeypatch) == expected
    assert world.dead == set(deaths), "a rank was not killed"
    assert "was lost" in caplog.text


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("name", [CASES[0].name, RECURRENT])
def test_steps_without_an_exchange_give_the_same_answers(name, always, model_of, monkeypatch):
    """Whichever way measured times choose, and where all steps are computed apart: the other replica's, too."""
    path, expected = model_of(name)
    ways = []

    def offloads(self, num_tokens: int) -> bool:
        ways.append(not always and len(ways) % 3 != 2)
        return ways[-1]

    monkeypatch.setattr(OffloadSelector, "offloads", offloads)
    config = config_of(2, 1, may_compute_alone=True)
    assert on_ranks(ThreadWorld(5.0), path, config, monkeypatch) == expected
    assert set(ways) == ({False} if always else {False, True})


SKEW = np.random.default_rng(5).pareto(0.8, 64)


@pytest.fixture
def heat_of(tmp_path):
    """Return what writes a heat file of a model, some of whose experts are used far more than others."""

    def write(path: object) -> str:
        place = tmp_path / "use.json"
        with open_model_file(str(path)) as file:
            spec = read_spec(file)
            identity = identify(file, spec)
        warmth = np.tile(SKEW[: spec.router.num_experts], (spec.num_layers, 1))
        write_heat(place, identity, HeatRecord(warmth, 1000))
        return str(place)

    return write


@pytest.mark.parametrize(
    ("dp", "tp", "deaths"), [(2, 1, {}), (1, 2, {}), (3, 1, {}), (2, 1, {1: 40}), (3, 1, {1: 30})]
)
@pytest.mark.parametrize("name", [CASES[0].name, RECURRENT])
def test_balanced_experts_give_the_same_answers(
    dp, tp, deaths, name, model_of, heat_of, monkeypatch
):
    """By rank 0's heat alone, with copies on several ranks, and after ranks were lost. The others know no use, and
    have rank 0's map all the same: else exchanges would not fit together."""
    path, expected = model_of(name)
    world = ThreadWorld(5.0, deaths)
    config = config_of(dp, tp, timeout_s=1.0 if deaths else 5.0, expert_map="balanced")
    maps = []
    original = mesh_builder.choose_map

    def choose_map(*given: object):
        maps.append(original(*given))
        return maps[-1]

    monkeypatch.setattr(mesh_builder, "choose_map", choose_map)
    with followed(world, path, config, monkeypatch) as mine:
        heat = HeatConfig(file=heat_of(path), saved=False)
        found = asyncio.run(answers(path, replace(mine, heat=heat)))
    assert found == expected
    (chosen,) = maps  # rank 0's
    assert chosen.experts.owner.shape[2] > 1, "some experts have copies"
    assert "balanced by the use" in chosen.reason
    assert world.dead == set(deaths)


def test_a_rank_with_another_model_is_refused_by_all(model_of, monkeypatch):
    """Although rank 0's map does not fit its model, all are told what differs, and nobody waits for it."""
    first, second = (model_of(name)[0] for name in (CASES[0].name, RECURRENT))
    config = config_of(2, 1)

    async def open_it(mine: EngineConfig) -> None:
        async with Engine.open(first, mine):
            pass

    with (
        pytest.raises(MeshError, match="rank 1 has another model file"),
        followed(ThreadWorld(5.0), second, config, monkeypatch) as mine,
    ):
        asyncio.run(open_it(mine))


def test_an_engine_explains_its_ranks_and_is_consistent(model_of, monkeypatch):
    """Its choices name ranks and workspace; its totals are those of all replicas; nothing is left in flight."""
    path, expected = model_of(CASES[0].name)

    async def ask(mine: EngineConfig) -> tuple[dict[str, str], int]:
        async with Engine.open(path, mine) as engine:
            asked = [engine.generate(prompt, max_tokens=9, ignore_eos=True) for prompt in PROMPTS]

            async def tokens(events) -> list[int]:
                return [token async for event in events for token in event.token_ids]

            assert await asyncio.gather(*map(tokens, asked)) == expected
            await engine.check_integrity()
            snapshot = await engine._thread.call(lambda loop: loop.snapshot())
            choices = {choice.name: str(choice) for choice in engine.choices()}
            return choices, snapshot.total_output_tokens

    with followed(ThreadWorld(5.0), path, config_of(2, 1), monkeypatch) as mine:
        choices, num_tokens = asyncio.run(ask(mine))
    assert "2 in 2 replicas" in choices["ranks"]
    assert "workspace of this rank" in choices
    assert "neighbouring" in choices["experts of this rank"]
    assert num_tokens == sum(map(len, expected))


def test_a_rank_with_another_flag_is_refused_by_all(model_of, monkeypatch):
    """The message names the rank and what differs; nobody hangs."""
    path, _ = model_of(CASES[0].name)
    config = config_of(2, 1)
    other = EngineConfig(**{**_fields(config), "memory": MemoryConfig(max_context_tokens=64)})
    world = ThreadWorld(5.0)

    async def open_it(mine: EngineConfig) -> None:
        memory = config.memory
        async with Engine.open(path, EngineConfig(**{**_fields(mine), "memory": memory})):
            pass

    with (
        pytest.raises(MeshError, match="rank 1 has another flag"),
        followed(world, path, other, monkeypatch) as mine,
    ):
        asyncio.run(open_it(mine))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"placement": PlacementConfig(trunk_device="torch-cpu")}, "leave out --trunk-device"),
        ({"remote": RemoteConfig(workers=("local",))}, "--expert-worker does not go with torchrun"),
    ],
)
def test_devices_for_layers_and_workers_do_not_go_with_ranks(refused, message, model_of):
    """What ranks can not use is refused before anything is opened."""
    path, _ = model_of(CASES[0].name)
    parallel = ParallelConfig(dp=2, rank=0, num_ranks=2)
    config = EngineConfig(**{**_fields(config_of(2, 1)), "parallel": parallel, **refused})

    async def open_it() -> None:
        async with Engine.open(path, config):
            pass

    with pytest.raises(ConfigError, match=message):
        asyncio.run(open_it())


def _fields(config: EngineConfig) -> dict[str, object]:
    names = ("memory", "placement", "heat", "scheduler", "parallel")
    return {name: getattr(config, name) for name in names}
