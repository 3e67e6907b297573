"""Layers with a sliding window keep only their window: less memory, the same bits, prefixes still shared."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled
from tests.support.toy_archs import ToyArch, write_toy_arch
from thermocline import Engine, EngineConfig, SamplingParams, SchedulerConfig
from thermocline.config import MemoryConfig
from thermocline.engine import cache_builder, scheduler_builder
from thermocline.kernels.cache_format import CacheType
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec
from thermocline.models.sizes import measure_sizes

LONG = ToyArch("laguna", layers=5, rotary=8, window=32, context=2048, head_dim=32)
STEM = [(7 * n + n * n) % 256 for n in range(1500)]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model of 2,048 tokens' context, whose layers but two see 32."""
    return write_toy_arch(tmp_path_factory.mktemp("toy") / "toy.gguf", LONG)


@pytest.fixture
def keeps_everything(monkeypatch):
    """Return a switch that lets layers with a window keep all positions, and mask."""

    def switch() -> None:
        cache_spec = cache_builder.cache_spec

        def all_blocks(*args):
            spec = cache_spec(*args)
            return replace(spec, window_blocks=spec.num_blocks)

        monkeypatch.setattr(cache_builder, "cache_spec", all_blocks)
        monkeypatch.setattr(scheduler_builder, "_request_windows", lambda *args: None)

    return switch


@pytest.fixture
def pools(monkeypatch):
    """Return the pools of the engines that are opened."""
    made: list[KVPool] = []

    def make(*args, **options) -> KVPool:
        made.append(KVPool(*args, **options))
        return made[-1]

    monkeypatch.setattr(cache_builder, "KVPool", make)
    return made


def config(*, chunk: int = 16, prefix_cache: bool = True, **memory: object) -> EngineConfig:
    return EngineConfig(
        memory=MemoryConfig(**memory),
        scheduler=SchedulerConfig(
            prefill_chunk_tokens=chunk, max_prompt_chunks=2, prefix_cache=prefix_cache
        ),
    )


async def ask(engine: Engine, prompt: list[int], count: int = 12) -> list[object]:
    """Return the ids and log-probabilities of an answer, token by token: a slow reader gets merged events."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=3)
    return [
        token
        async for event in engine.generate(prompt, params)
        for token in zip(event.token_ids, event.logprobs, event.top_logprobs, strict=True)
    ]


async def hits(engine: Engine, prompt: list[int], count: int = 2) -> int:
    """Return how many tokens of a prompt were found computed."""
    before = (await engine.snapshot()).cache.total_hit_tokens
    await greedy_tokens(engine, prompt, count)
    return (await engine.snapshot()).cache.total_hit_tokens - before


def touched_blocks(pool: KVPool, layer: int) -> int:
    """Return how many blocks of a layer were ever written."""
    return int(np.count_nonzero(pool.layer(layer).values.any(axis=(1, 2))))


KV_TYPES = [cache_type.name.lower() for cache_type in CacheType]
# The slow twins: one type of numbers, and one of blocks.
SETTINGS = [
    *(("native", kv_type, block_tokens) for kv_type in KV_TYPES for block_tokens in (5, 16)),
    *(("reference", kv_type, 5) for kv_type in ("f16", "q8_0")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "kv_type", "block_tokens"), SETTINGS)
async def test_no_bit_differs_from_layers_that_keep_everything(
    long, keeps_everything, kernels, kv_type, block_tokens
):
    """Whatever a cached number is, prompts beyond the window and their answers are the same."""
    setting = EngineConfig(
        memory=MemoryConfig(kv_type=kv_type, block_tokens=block_tokens, max_windows=2),
        scheduler=SchedulerConfig(prefill_chunk_tokens=7, max_prompt_chunks=2),
        kernels=kernels,
    )
    prompts, count = [STEM[:70], [9, *STEM[:60]], STEM[:50]], 12
    if kernels == "reference":
        prompts, count = [STEM[:45], [9, *STEM[:34]]], 5
    async with Engine.open(long, setting) as engine:
        answers = await asyncio.gather(*(ask(engine, prompt, count) for prompt in prompts))
        again = [await ask(engine, prompt, count) for prompt in prompts]
        assert (await engine.snapshot()).cache.total_hit_tokens > 0
        await settled(engine)
    keeps_everything()
    async with Engine.open(long, setting) as engine:
        assert (await engine.snapshot()).cache.num_window_blocks == 0
        expected = [await ask(engine, prompt, count) for prompt in prompts]
    assert answers == again == expected


@pytest.mark.slow
async def test_a_long_prompt_writes_few_blocks_of_layers_with_a_window(long, pools):
    """Of 97 blocks of tokens such a layer has its window and two chunks in memory: 7 blocks at most, as priced."""
    setting = config(chunk=32, prefix_cache=False, kv_type="q8_0")
    async with Engine.open(long, setting) as engine:
        await greedy_tokens(engine, STEM, 40)
        await settled(engine)
    (pool,) = pools
    written = [touched_blocks(pool, layer) for layer in range(5)]
    assert written[0] == written[4] == 97
    assert all(num_blocks <= 7 for num_blocks in written[1:4]), written
    with open_model_file(long) as file:
        sizes = measure_sizes(
            file.tensors.values(), read_spec(file), CacheType.Q8_0, in_flight_tokens=2 * 32
        )
    block_bytes = 2 * int(np.prod(pool.layer(LayerIndex(0)).shape.array_shape[1:]))
    assert sizes.layers[1].kv(len(STEM)) == 7 * block_bytes
    assert sizes.layers[0].kv(len(STEM)) == len(STEM) * block_bytes // 16


@pytest.mark.slow
async def test_less_is_reserved_and_more_is_never_used(long, pools, keeps_everything):
    """With prefixes kept too, such a layer stays within its own blocks: a few windows of each long prompt."""
    setting = config(chunk=32, max_windows=8, max_full_contexts=4)
    async with Engine.open(long, setting) as engine:
        await greedy_tokens(engine, STEM, 4)
        once = touched_blocks(pools[0], 1)
        for start in range(1, 5):
            await greedy_tokens(engine, STEM[start:], 4)
        await settled(engine)
    keeps_everything()
    async with Engine.open(long, setting):
        pass
    own, everything = pools
    of_window, of_all = (own.layer(layer).shape.num_blocks for layer in (1, 0))
    assert (of_window, of_all) == (8 * 3 + 6, 4 * 128)
    assert once < 94 // 4 + 10
    assert once < touched_blocks(own, 1) <= of_window
    assert own.reserved_bytes / everything.reserved_bytes == (3 * of_window + 2 * of_all) / (
        5 * of_all
    )


@pytest.mark.slow
async def test_prompts_share_what_all_layers_still_have(long):
    """The same prompt, one that goes on, and some that leave it: the first of those computes a little anew."""
    async with Engine.open(long, config(chunk=64)) as engine:
        assert await hits(engine, STEM[:400]) == 0
        assert await hits(engine, STEM[:400]) == 384
        assert await hits(engine, STEM[:450]) == 400
        assert await hits(engine, [*STEM[:300], 1, 2, 3]) == 192
        assert await hits(engine, [*STEM[:300], 4, 5]) == 288
        await settled(engine)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_requests_beyond_the_windows_wait(long, prefix_cache):
    """Where windows are short and other blocks are not, answers come one after the other, all as alone."""
    setting = config(prefix_cache=prefix_cache, block_tokens=4, max_windows=1, max_full_contexts=8)
    prompts = [[n, *STEM[: 20 + 5 * n]] for n in range(6)]
    async with Engine.open(long, setting) as engine:
        expected = [await ask(engine, prompt, 30) for prompt in prompts]
        answers = await asyncio.gather(*(ask(engine, prompt, 30) for prompt in prompts))
        await settled(engine)
    assert answers == expected
