"""Logits against llama.cpp on the same file, and on a float32 file of the values that it decodes to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from benchmarks import synthetic_model
from benchmarks.synthetic_blocks import DRAWABLE
from benchmarks.synthetic_model import Shape
from tests.oracle.llama_model import LlamaModel, write_float32_twin
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, prompt_logits
from tests.support.oracle_cases import (
    ALL_CASES,
    BLOCK_CASES,
    HALF_CASES,
    LONGEST_PROMPT,
    PROMPT_LENGTHS,
    prompt_ids,
    write_case,
)
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.config import CpuConfig, EngineConfig, SchedulerConfig
from thermocline.engine.api import Engine

pytestmark = pytest.mark.oracle

# Where every expert is chosen, a rounded activation can not change the choice, which is a jump that no
# tolerance covers.
ALL_CHOSEN = tuple(
    replace(case, shape=replace(case.shape, experts=4, used=4)) for case in HALF_CASES + BLOCK_CASES
)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
async def test_logits_agree_in_float32(tmp_path, case):
    """llama.cpp gives our logits when it gets the weights in float32, whatever format we compute from."""
    path = write_case(tmp_path / "model.gguf", case)
    wide = write_float32_twin(tmp_path / "float32.gguf", case, path)
    async with Engine.open(
        path, EngineConfig(kernels=case.exact_kernels, memory=EXACT_CACHE)
    ) as engine:
        with LlamaModel(wide) as llama:
            for length in PROMPT_LENGTHS:
                ids = prompt_ids(length)
                ours = await prompt_logits(engine, ids)
                assert_within(ours, llama.logits(ids), "llama.cpp/F32")


@pytest.mark.parametrize("case", ALL_CHOSEN, ids=str)
async def test_logits_agree_on_the_same_file(tmp_path, case):
    """On the very same file, the logits differ by no more than rounded activations explain."""
    path = write_case(tmp_path / "model.gguf", case)
    ids = prompt_ids(LONGEST_PROMPT)
    async with Engine.open(path) as engine:
        ours = await prompt_logits(engine, ids)
    with LlamaModel(path) as llama:
        assert_within(ours, llama.logits(ids), f"llama.cpp/{case.format}")


@pytest.mark.parametrize("scale", [0.0, 1.0])
async def test_an_unscaled_router_agrees(tmp_path, scale):
    """A file that says its routing weights are not scaled, with 0 or with 1, is read as such."""
    metadata = {"qwen3moe.expert_weights_scale": scale}
    path = write_toy_model(tmp_path / "model.gguf", ToyShape(seed=41), metadata=metadata)
    ids = prompt_ids(LONGEST_PROMPT)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
    with LlamaModel(path) as llama:
        assert_within(ours, llama.logits(ids), "llama.cpp/F32")


async def test_a_missing_expert_width_agrees(tmp_path):
    """A file without the width of an expert has it from the dense width and the experts used."""
    path = write_toy_model(tmp_path / "model.gguf", ToyShape(seed=42))
    content = path.read_bytes()
    key = b"qwen3moe.expert_feed_forward_length"
    assert content.count(key) == 1
    path.write_bytes(content.replace(key, b"qwen3moe.nothing_that_is_ever_asked"))
    ids = prompt_ids(LONGEST_PROMPT)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
    with LlamaModel(path) as llama:
        assert_within(ours, llama.logits(ids), "llama.cpp/F32")


# Where every expert is chosen, as above.
CHOSEN = Shape(2, 256, 4, 2, 64, 4, 4, 256, 512, 4096, 1e6)


@pytest.mark.parametrize("isa", ["avx2", "auto"])
@pytest.mark.parametrize("name", sorted({*DRAWABLE} - {"F32", "F16", "BF16"}))
async def test_every_type_agrees_on_the_same_file(tmp_path, monkeypatch, name, isa):
    """A model all of whose matrices are in one type, those of two and three bits among them: a prompt, and an answer.

    The last tokens come one by one, and so from rows as they lie, not from panels.
    """
    monkeypatch.setattr(synthetic_model, "SHAPES", {"chosen": CHOSEN})
    path = synthetic_model.write_model(tmp_path / "model.gguf", "chosen", layers=2, mix=name)
    ids = [int(n) for n in np.random.default_rng(5).integers(0, 500, 40)]
    config = EngineConfig(
        cpu=CpuConfig(isa=isa), scheduler=SchedulerConfig(prefill_chunk_tokens=37)
    )
    single = replace(config, scheduler=SchedulerConfig(prefill_chunk_tokens=1))
    async with Engine.open(path, config) as engine:
        ours = await prompt_logits(engine, ids)
    async with Engine.open(path, single) as engine:
        one_by_one = await prompt_logits(engine, ids[-8:])
    with LlamaModel(path) as llama:
        assert_within(ours, llama.logits(ids), "llama.cpp/any type")
        assert_within(one_by_one, llama.logits(ids[-8:]), "llama.cpp/any type")
