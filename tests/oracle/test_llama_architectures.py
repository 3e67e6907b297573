"""Each architecture against llama.cpp on the same file: float32 logits, and perplexity of quantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_model import LlamaModel, llama_perplexity
from tests.support.arch_cases import (
    DEEPSEEK4_CASE,
    DENSE_HYBRID_CASE,
    DENSE_SIBLING_CASES,
    DOTS3_CASE,
    GLM5_CASE,
    HY_V4_CASE,
    LONG_PROMPTS,
    MINIMAX_M3_CASE,
    MORE_SCHEDULED_CASES,
    READERS_CASE,
    SCHEDULED_CASES,
    SPARSE_CASE,
    STREAMS_CASE,
)
from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, prompt_logits
from tests.support.fused_projections import SCALED_ROPES, biased, fused
from tests.support.llama_cases import LLAMA_CASES, WHOLE_TAIL_CASES
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine
from thermocline.engine.scoring import perplexity
from thermocline.sampling.params import SamplingParams

pytestmark = pytest.mark.oracle

MAX_RELATIVE_DIFFERENCE = 0.005
TEXTS = 20


@pytest.mark.parametrize("case", LLAMA_CASES, ids=str)
async def test_logits_agree_in_float32(tmp_path, case):
    """llama.cpp gives our logits on the same file, for prompts around a chunk's length."""
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        with LlamaModel(path) as llama:
            for length in (1, 7, 65, LONG_PROMPTS.get(case.toy.arch, 130)):
                ids = prompt_ids(length)
                ours = await prompt_logits(engine, ids)
                assert_within(ours, llama.logits(ids), _limit(case.toy))


def _limit(toy: ToyArch) -> str:
    if toy.arch == "gemma4":
        return "llama.cpp/F32 and GELU"
    rounds = toy.arch == "minimax-m3" and toy.dense
    return "llama.cpp/F32 and halves" if rounds else "llama.cpp/F32"


@pytest.mark.parametrize("case", WHOLE_TAIL_CASES, ids=str)
async def test_logits_agree_where_the_last_block_lacks_one_position(tmp_path, case):
    """There llama.cpp reads no more than whole blocks and the positions behind them.

    It fills up to the budget and a block but one position, with positions of the block that is next best.
    """
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    ids = prompt_ids(130)
    ratio = max(case.toy.extra["attention.compress_ratios"])
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
    with LlamaModel(path) as llama:
        assert_within(
            ours[ratio - 2 :: ratio], llama.logits(ids)[ratio - 2 :: ratio], "llama.cpp/F32"
        )


WRITTEN_OTHERWISE = {
    "olmoe": ToyArch("olmoe", kv_heads=4, layers=2),
    "qwen2moe": ToyArch("qwen2moe", layers=2),
    "qwen35moe": ToyArch("qwen35moe", layers=2, interval=2, rotary=8),
    "qwen3next": ToyArch("qwen3next", layers=2, interval=2, rotary=8),
}


@pytest.mark.parametrize("keys", SCALED_ROPES.values(), ids=SCALED_ROPES)
@pytest.mark.parametrize("toy", WRITTEN_OTHERWISE.values(), ids=WRITTEN_OTHERWISE)
async def test_fused_biased_and_stretched_files_agree(tmp_path, toy, keys):
    """q, k and v in one tensor, biases, and rotary scaling mean to us what they mean to llama.cpp."""
    toy = replace(toy, extra=toy.extra | keys)
    weights = toy_arch_weights(toy)
    if toy.arch in ("olmoe", "qwen2moe"):
        weights = biased(weights)
    path = write_toy_arch(tmp_path / "model.gguf", toy, weights=fused(weights))
    ids = prompt_ids(130)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
    with LlamaModel(path) as llama:
        assert_within(ours, llama.logits(ids), "llama.cpp/F32")


def _all_chosen(toy: ToyArch) -> dict[str, Any]:
    """Llama 4 chooses one, and llama.cpp knows one size of its chunks, and of SmallThinker's windows.

    What positions are read of qwen4exp is chosen, too, and llama.cpp reads more.
    """
    if toy.arch == "qwen4exp":
        return {"experts": 4, "used": 4, "extra": toy.extra | {"attention.indexer.top_k": 512}}
    if toy.arch == "llama4":
        return {"experts": 1, "window": 0}
    return {"experts": 4, "used": 4} | ({"window": 4096} if toy.arch == "smallthinker" else {})


# Where every expert is chosen, a rounded activation can not change the choice, which is a jump.
ALL_CHOSEN = [
    replace(case, toy=replace(case.toy, **{"context": 128, "extra": {}} | _all_chosen(case.toy)))
    for case in (
        *SCHEDULED_CASES,
        *MORE_SCHEDULED_CASES,
        SPARSE_CASE,
        STREAMS_CASE,
        GLM5_CASE,
        DEEPSEEK4_CASE,
        DOTS3_CASE,
        HY_V4_CASE,
        MINIMAX_M3_CASE,
    )
    if case.toy.arch != "phimoe"  # which it computes otherwise
]


DENSE = (READERS_CASE, DENSE_HYBRID_CASE, *DENSE_SIBLING_CASES)


@pytest.mark.parametrize("case", [*ALL_CHOSEN, *DENSE], ids=str)
async def test_perplexity_agrees_on_quantised_weights(tmp_path, case):
    """The perplexity of texts that the model finds likely differs by at most half a percent.

    It wrote them itself: a text of random tokens is so unlikely that rounded activations alone move it.
    """
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    text: list[int] = []
    async with Engine.open(path) as engine:
        for seed in range(TEXTS):
            params = SamplingParams(max_tokens=95, ignore_eos=True, temperature=0.2, seed=seed)
            text.append(seed)
            async for event in engine.generate([seed], params):
                text += event.token_ids
        ours = await perplexity(engine, text, 96)
    with LlamaModel(path) as llama:
        theirs = llama_perplexity(llama, text, 96)
    assert abs(ours.perplexity / theirs - 1) <= MAX_RELATIVE_DIFFERENCE, (ours, theirs)
