"""Ranks of one replica divide a prompt's rows: each computes its own, and answers are those of one process to the bit.

Ranks are threads here, with groups in memory.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    SchedulerConfig,
)
from thermocline.engine.api import Engine
from thermocline.errors import StageError
from thermocline.messages import Pooling, PromptEmbedding, RequestOptions
from thermocline.models.decoder import Decoder
from thermocline.parallel import parts
from thermocline.parallel.parts import ChunkPart
from thermocline.parallel.rank import RankMember
from thermocline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import Chunk

pytestmark = pytest.mark.slow

IS_WHOLE = "THERMOCLINE_PARALLEL" in os.environ
CASES = [case for case in ARCH_CASES if case.toy.experts]
TOYS = {case.name: case.toy for case in CASES}
FIRST = list({case.toy.arch: case.name for case in reversed(CASES)}.values())
RECURRENT = next(case.name for case in CASES if case.toy.arch in {"qwen3next", "qwen35moe"})
# Rows of a cache in Q8_0 are multiples of 32 numbers.
WIDE = {
    "wide": replace(CASES[0].toy, head_dim=32),
    "wide hybrid": replace(TOYS[RECURRENT], head_dim=32),
    "wide latent": replace(TOYS["deepseek2_flash"], head_dim=48, rotary=32),
}
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]
COUNTS = (1, 3, 7, 64, 500)


def config_of(
    dp: int, tp: int, chunk: int = 512, cache: str = "f16", **parallel: Any
) -> EngineConfig:
    """Return the config of small ranks; as many tokens of prompts as `chunk` go through the layers together."""
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=512, kv_type=cache),
        placement=PlacementConfig(hot_device="none", trunk_device="cpu"),
        heat=HeatConfig(enabled=False),
        scheduler=SchedulerConfig(prefill_chunk_tokens=chunk),
        parallel=ParallelConfig(
            dp=dp,
            tp=tp,
            num_ranks=dp * tp,
            **({"timeout_s": 5.0, "may_compute_alone": False} | parallel),
        ),
    )


def prompt(count: int) -> list[int]:
    """Return so many tokens, others for each count."""
    return np.random.default_rng(count).integers(3, 90, count).tolist()


async def answers(
    path: object, config: EngineConfig, counts: Sequence[int] = COUNTS, tokens: int = 3
) -> list[list[tuple[int, float]]]:
    """Return the answers to prompts of so many tokens, asked at once: tokens, and how likely each was."""
    async with Engine.open(path, config) as engine:

        async def one(count: int) -> list[tuple[int, float]]:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=1)
            events = engine.generate(prompt(count), params)
            return [
                (each.token_id, each.logprob) async for event in events for each in event.logprobs
            ]

        return await asyncio.gather(*map(one, counts))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return the file of a case, and its answers in one process."""
    made: dict[str, object] = {}
    known: dict[tuple[str, tuple[int, ...], str], list] = {}

    def make(name: str, counts: Sequence[int] = COUNTS, cache: str = "f16") -> tuple[object, list]:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("divided") / f"{name}.gguf"
            write_toy_arch(made[name], (TOYS | WIDE)[name])
        key = name, tuple(counts), cache
        if key not in known:
            whole = config_of(1, 1, cache=cache)
            names = ("memory", "placement", "heat")
            alone = EngineConfig(**{field: getattr(whole, field) for field in names})
            known[key] = asyncio.run(answers(made[name], alone, counts))
        return made[name], known[key]

    return make


@pytest.fixture
def divided(monkeypatch) -> list[tuple[int, ChunkPart]]:
    """Have chunks of any number of tokens divided; return the parts that ranks got, with the rank of each."""
    monkeypatch.setattr(parts, "MIN_DIVIDED_TOKENS", 1)
    found: list[tuple[int, ChunkPart]] = []
    original = RankMember.own_part

    def own_part(self: RankMember, number: int, chunk: object):
        own = original(self, number, chunk)
        if isinstance(own, ChunkPart):
            found.append((self.rank, own))
        return own

    monkeypatch.setattr(RankMember, "own_part", own_part)
    return found


def on_ranks(
    world: ThreadWorld, path: object, config: EngineConfig, monkeypatch, counts=COUNTS
) -> list:
    """Return the answers of several ranks."""
    with followed(world, path, config, monkeypatch) as mine:
        return asyncio.run(answers(path, mine, counts))


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("kind", ["leader", "sequence", "naive"])
@pytest.mark.parametrize(("dp", "tp"), MESHES if IS_WHOLE else [(1, 2), (2, 2), (1, 4)])
def test_answers_are_those_of_one_process(dp, tp, kind, chunk, model_of, divided, monkeypatch):
    """Prompts of 1 to 500 tokens, with two rounds in flight and one; every logit is the same to the bit."""
    path, expected = model_of(CASES[0].name)
    config = config_of(dp, tp, chunk, exchange=kind)
    assert on_ranks(ThreadWorld(5.0), path, config, monkeypatch) == expected
    ranks = {rank for rank, _ in divided}
    assert ranks == (set(range(dp * tp)) if tp > 1 and kind != "naive" else set())


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "f16") for name in (TOYS if IS_WHOLE else FIRST)),
        *((name, "q8_0") for name in WIDE),
    ],
)
def test_every_architecture_answers_alike(name, cache, model_of, divided, monkeypatch):
    """Windows, latent rows, recurrent states and keys of other layers included."""
    counts = (3, 100, 45)
    path, expected = model_of(name, counts, cache)
    config = config_of(1, 2, 64, cache)
    assert on_ranks(ThreadWorld(5.0), path, config, monkeypatch, counts) == expected
    assert {rank for rank, _ in divided} == {0, 1}


@pytest.mark.parametrize("name", [CASES[0].name, RECURRENT])
def test_each_rank_computes_its_own_rows_alone(name, model_of, divided, monkeypatch):
    """The rows that ranks route in a layer are together those of the prompts: none is computed twice."""
    counts = (64, 45)
    path, expected = model_of(name, counts)
    routed: dict[tuple[int, int], int] = defaultdict(int)
    original = Decoder.route

    def route(self: Decoder, layer: int, chunk: Chunk, x: np.ndarray):
        if chunk.is_prompt:
            routed[id(self), layer] += len(x)
        return original(self, layer, chunk, x)

    monkeypatch.setattr(Decoder, "route", route)
    found = on_ranks(ThreadWorld(5.0), path, config_of(1, 2), monkeypatch, counts)
    assert found == expected
    models = {model for model, _ in routed}
    layers = {layer for _, layer in routed}
    assert len(models) == 2
    for layer in layers:
        rows = [routed[model, layer] for model in models]
        assert sum(rows) == sum(counts)
        assert max(rows) - min(rows) <= len(counts)


@pytest.mark.parametrize("name", [CASES[0].name, RECURRENT])
def test_what_fails_each_time_is_told(name, model_of, divided, monkeypatch):
    """Also where a state is lost with the step, so that the tokens before it are computed again in other chunks."""
    path, _ = model_of(name, (45,))
    original = Decoder.route

    def route(self: Decoder, layer: int, chunk: Chunk, x: np.ndarray):
        if chunk.positions.max() >= 20:
            raise OSError("the disk is broken")
        return original(self, layer, chunk, x)

    monkeypatch.setattr(Decoder, "route", route)
    with pytest.raises(StageError, match="the disk is broken"):
        on_ranks(ThreadWorld(5.0), path, config_of(1, 2, 16, timeout_s=1.0), monkeypatch, (45,))


@pytest.mark.parametrize(
    ("dp", "tp", "deaths"),
    [(1, 2, {1: 30}), (1, 4, {2: 32, 3: 78}), (2, 2, {1: 34}), (2, 2, {2: 38})],
)
@pytest.mark.parametrize("name", [CASES[0].name, RECURRENT])
def test_a_replica_outlives_the_loss_of_a_rank(
    dp, tp, deaths, name, model_of, divided, monkeypatch, caplog
):
    """In the middle of a divided prompt: the others have its keys and values, or compute them again."""
    # Whichever requests have arrived when the first chunk is made, it has tokens for all ranks.
    counts = (64, 500, 7, 3, 1)
    path, expected = model_of(name, counts)
    world = ThreadWorld(5.0, deaths)
    config = config_of(dp, tp, 64, timeout_s=1.0)
    assert on_ranks(world, path, config, monkeypatch, counts) == expected
    assert world.dead == set(deaths), "a rank was not killed"
    assert "was lost" in caplog.text
    assert divided


def test_a_prompt_that_came_before_is_found(model_of, divided, monkeypatch):
    """Whoever computed its rows: every rank has the cache of all of them."""
    counts = (100,)
    path, (expected,) = model_of(CASES[0].name, counts)

    async def ask(mine: EngineConfig) -> None:
        async with Engine.open(path, mine) as engine:
            for _ in range(2):
                params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
                events = [each async for each in engine.generate(prompt(100), params)]
                found = [(each.token_id, each.logprob) for e in events for each in e.logprobs]
                assert found == expected
            timings = events[-1].timings
            assert timings is not None
            assert timings.num_cached_tokens > 0
            await engine.check_integrity()

    with followed(ThreadWorld(5.0), path, config_of(1, 2), monkeypatch) as mine:
        asyncio.run(ask(mine))
    assert divided


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_logits_and_states_of_every_row_come_in_order(dp, tp, model_of, divided, monkeypatch):
    """Each rank has those of its rows: rank 0 gets them, and puts them together."""
    path, _ = model_of(CASES[0].name)
    texts = [prompt(count) for count in (33, 100, 5)]

    async def ask(mine: EngineConfig) -> list[np.ndarray]:
        async with Engine.open(path, mine) as engine:
            scored = [[each.logits async for each in engine.score(text)] for text in texts]
            options = RequestOptions(pooling=Pooling.MEAN, cache_salt="another")
            params = SamplingParams(max_tokens=0)

            async def embedded(text: list[int]) -> np.ndarray:
                events = [each async for each in engine.events(text, params, options)]
                (found,) = [each.vector for each in events if isinstance(each, PromptEmbedding)]
                return found

            vectors = await asyncio.gather(*map(embedded, texts))
            return [np.concatenate(each) for each in scored] + vectors

    alone = config_of(1, 1, 64)
    names = ("memory", "placement", "heat", "scheduler")
    expected = asyncio.run(ask(EngineConfig(**{name: getattr(alone, name) for name in names})))
    with followed(ThreadWorld(5.0), path, config_of(dp, tp, 64), monkeypatch) as mine:
        found = asyncio.run(ask(mine))
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    assert any(len(part.logits_rows) > 1 for _, part in divided)
    assert any(part.states_rows is not None for _, part in divided)
