"""The invariant: no split, chunk size, tier or trace setting changes a token or a bit of the logits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.engine_runs import schedules
from tests.support.latent_cases import LATENT_OPTIONS
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    PrefetchConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from thermocline.config import CpuConfig
from thermocline.kernels.instruction_sets import best_instruction_set
from thermocline.kernels.native import load_native

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 256, 75)]
HOT_SHARES = [0.0, 0.5, 1.0]
CHUNKS = [1, 7, 64, 1024]
MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
SHAPES = {
    "f32": ToyShape(layers=2, experts=8, used=3),
    "mixed": ToyShape(
        layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, formats=MIX
    ),
}


def config(hot: float, chunk: int, *, trace: bool, kernels: str = "native", prefetch: bool = True):
    return EngineConfig(
        placement=PlacementConfig(hot_device="cpu" if hot else "none", hot_fraction=hot),
        scheduler=SchedulerConfig(prefill_chunk_tokens=chunk),
        prefetch=PrefetchConfig(mode="on" if prefetch else "off"),
        trace=TraceConfig(enabled=trace),
        cpu=CpuConfig(threads=2 if trace else 1),
        kernels=kernels,
    )


async def tokens_and_logits(path, engine_config, *, new_tokens=12):
    async with Engine.open(path, engine_config) as engine:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        tokens = []
        async for event in engine.generate(PROMPT, params):
            tokens += event.token_ids
        logits = [part.logits async for part in engine.score(PROMPT + tokens)]
        await engine.check_integrity()
    return tokens, np.concatenate(logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
async def test_every_schedule_gives_the_same_bits(tmp_path, name):
    """Hot share x chunk size x trace x prefetch x threads: tokens equal and logits bit-identical."""
    path = write_toy_model(tmp_path / "toy.gguf", SHAPES[name])
    expected = await tokens_and_logits(path, config(0.0, 1024, trace=False))
    assert len(set(expected[0])) > 3, "a model that repeats one token proves nothing"
    for hot, chunk, trace in schedules(HOT_SHARES, CHUNKS):
        setting = config(hot, chunk, trace=trace, prefetch=not trace)
        tokens, logits = await tokens_and_logits(path, setting)
        assert tokens == expected[0], f"hot {hot}, chunk {chunk}, trace {trace}"
        np.testing.assert_array_equal(logits, expected[1])


@pytest.mark.slow
async def test_the_form_of_latent_attention_does_not_depend_on_chunks(tmp_path):
    """Whole cells of the prompt are expanded in pieces of any size, or found: the same tokens and bits."""
    toy = ToyArch("deepseek2", **LATENT_OPTIONS["v3"])
    path = write_toy_arch(tmp_path / "toy.gguf", toy)
    expected = await tokens_and_logits(path, config(0.0, 1024, trace=False))
    for hot, chunk in itertools.product([0.0, 0.5], [1, 30]):
        tokens, logits = await tokens_and_logits(path, config(hot, chunk, trace=hot > 0))
        assert tokens == expected[0], f"hot {hot}, chunk {chunk}"
        np.testing.assert_array_equal(logits, expected[1])
    async with Engine.open(path, config(0.0, 7, trace=False)) as engine:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        for prompt in (PROMPT[:40], PROMPT[:66], PROMPT):
            tokens = [t async for event in engine.generate(prompt, params) for t in event.token_ids]
    assert tokens == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
async def test_reference_and_native_kernels_agree(tmp_path, name):
    """The slow twins give the same model, within rounding, through a different split and chunk."""
    path = write_toy_model(tmp_path / "toy.gguf", SHAPES[name])
    expected = await tokens_and_logits(path, config(0.0, 1024, trace=False), new_tokens=4)
    actual = await tokens_and_logits(
        path, config(0.5, 7, trace=False, kernels="reference"), new_tokens=4
    )
    entry = "reference/int8 activations"
    if name == "f32":
        on_tiles = best_instruction_set(load_native()) == "amx"
        entry = "reference/16-bit attention" if on_tiles else "reference/float32"
    assert actual[0] == expected[0]
    assert_within(expected[1], actual[1], entry)
