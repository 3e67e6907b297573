"""Files as users get them: transformers' models through llama.cpp's converter and quantiser.

Float32 files must answer as transformers does. In quantised files each side rounds activations in its own way, and a
random router chooses otherwise where two experts are nearly tied: so the middle position's error is compared, against
exact arithmetic on what the file's weights decode to.
"""

from __future__ import annotations

import asyncio

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

from scripts.demo_model.export import replace_block
from tests.oracle.decoded import decoded_weights
from tests.oracle.hf_archs import Keys
from tests.oracle.llama_model import LlamaModel, llama_perplexity
from tests.oracle.test_llama_drafts import compare as compare_blocks
from tests.oracle.toolchain.quantise import quantise
from tests.oracle.toolchain.tiny_hf import TinyModel
from tests.oracle.toolchain.tool_cases import (
    BF16_CASES,
    MIXED_CASES,
    NVFP4_CASES,
    OTHER_CASES,
    PACKED_CASES,
    SMALL_CASES,
    ToolCase,
)
from tests.oracle.toolchain.workshop import MIXES, Workshop, open_exact
from tests.support.arch_cases import LONG_PROMPTS
from tests.support.compare import assert_within
from tests.support.converted_files import position_errors
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.oracle_cases import ANSWER_TOKENS, MIN_LEAD, prompt_ids
from thermocline.config import EngineConfig
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.engine.api import Engine
from thermocline.engine.scoring import perplexity
from thermocline.sampling.params import SamplingParams

pytestmark = pytest.mark.oracle

PROMPT_TOKENS = 65
MIXED_PROMPT_TOKENS = 130
MAX_TIMES_LLAMA = 3.0
# Where every product is exact on both sides, errors are noise and their ratio is, too.
NOISE = 1e-10
MAX_RELATIVE_DIFFERENCE = 0.005
MAX_NVFP4_ERROR = 1e-3
NUM_TEXTS, TEXT_TOKENS = 10, 128


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Files, made once each."""
    return Workshop(tmp_path_factory.mktemp("toolchain"))


@pytest.mark.parametrize("case", SMALL_CASES + OTHER_CASES, ids=str)
async def test_a_converted_file_answers_as_transformers(workshop, case):
    """Logits and 64 greedy tokens of the model that was converted."""
    oracle, path = workshop.converted(case)
    ids = prompt_ids(PROMPT_TOKENS)
    expected, least_lead = oracle.greedy(ids, ANSWER_TOKENS)
    assert least_lead > MIN_LEAD, "two tokens are too close to compare: give the case another seed"
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        assert_within(await prompt_logits(engine, ids), oracle.logits(ids), "transformers/F32")
        assert await greedy_tokens(engine, ids, ANSWER_TOKENS) == expected


@pytest.mark.parametrize("case", BF16_CASES, ids=str)
async def test_a_file_in_bfloat16_answers_as_transformers(workshop, case):
    """The converter's bfloat16: transformers' logits and answer from the rounded weights."""
    path = workshop.converted(case)[1]
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"BF16", "F32"}
    oracle, ids = open_exact(path), prompt_ids(PROMPT_TOKENS)
    expected, least_lead = oracle.greedy(ids, ANSWER_TOKENS)
    assert least_lead > MIN_LEAD, "two tokens are too close to compare: give the case another seed"
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        assert_within(await prompt_logits(engine, ids), oracle.logits(ids), "transformers/BF16")
        assert await greedy_tokens(engine, ids, ANSWER_TOKENS) == expected


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("case", MIXED_CASES, ids=str)
async def test_a_quantised_file_is_as_near_as_in_llama_cpp(workshop, case, mix):
    """The middle position's error is at most three times llama.cpp's own on the same file."""
    path = workshop.quantised(case, mix)
    ids = prompt_ids(MIXED_PROMPT_TOKENS)
    exact = open_exact(path).logits(ids)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = np.median(position_errors(await prompt_logits(engine, ids), exact))
    with LlamaModel(path) as llama:
        theirs = np.median(position_errors(llama.logits(ids), exact))
    print(f"{case} {mix}: ours {ours:.2e}, llama.cpp {theirs:.2e}")  # noqa: T201 - shown by -s
    assert ours <= max(MAX_TIMES_LLAMA * theirs, NOISE), (ours, theirs)


@pytest.mark.parametrize("case", NVFP4_CASES, ids=str)
async def test_scales_beside_the_blocks_are_applied(workshop, case):
    """From an NVFP4 checkpoint: exact with kernels that round nothing, and as near as llama.cpp with the others.

    Release 0.3.36 of llama.cpp leaves out the scales of experts of most architectures, and answers NaN there. Its
    converter knows no such experts of granitemoe, whose own factors meet the scales of attention.
    """
    path = workshop.converted(case)[1]
    ids = prompt_ids(PROMPT_TOKENS)
    exact = open_exact(path).logits(ids)
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert "blk.1.attn_q.scale" in names
    assert ("blk.1.ffn_down_exps.scale" in names) == (case.tiny.arch != "granitemoe")
    async with Engine.open(path, EngineConfig(kernels="reference", memory=EXACT_CACHE)) as engine:
        assert_within(await prompt_logits(engine, ids[:12]), exact[:12], "transformers/mixed")
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = np.median(position_errors(await prompt_logits(engine, ids), exact))
    with LlamaModel(path) as llama:
        theirs = np.median(position_errors(llama.logits(ids), exact))
    print(f"{case}: ours {ours:.2e}, llama.cpp {theirs:.2e}")  # noqa: T201 - shown by -s
    assert ours <= MAX_NVFP4_ERROR
    if case.tiny.arch in ("qwen3moe", "qwen3next", "qwen35moe"):
        assert ours <= MAX_TIMES_LLAMA * theirs, (ours, theirs)


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
async def test_experts_in_the_hubs_mxfp4_are_repacked(workshop, case):
    """The model that the blocks decode to: exact with kernels that round nothing, and near with the others."""
    oracle, path = workshop.converted(case)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert {kinds[f"blk.1.ffn_{role}_exps.weight"] for role in ("gate", "up", "down")} == {"MXFP4"}
    ids = prompt_ids(PROMPT_TOKENS)
    exact = oracle.logits(ids)
    # With no activation rounded, and so long that all kinds of entries are read.
    far = prompt_ids(LONG_PROMPTS.get(Keys(path).arch, 24))
    async with Engine.open(path, EngineConfig(kernels="reference", memory=EXACT_CACHE)) as engine:
        assert_within(await prompt_logits(engine, far), oracle.logits(far), "transformers/mixed")
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = np.median(position_errors(await prompt_logits(engine, ids), exact))
    print(f"{case}: ours {ours:.2e}")  # noqa: T201 - shown by -s
    assert ours <= MAX_NVFP4_ERROR


@pytest.fixture(scope="module")
def likely_text():
    """Texts that the packaged model wrote itself: what it finds unlikely would be moved by rounding alone."""

    async def write() -> list[int]:
        tokens: list[int] = []
        async with Engine.open(DEMO_MODEL_PATH) as engine:
            for seed in range(NUM_TEXTS):
                params = SamplingParams(
                    max_tokens=TEXT_TOKENS - 1, ignore_eos=True, temperature=0.7, seed=seed
                )
                tokens.append(seed)
                async for event in engine.generate([seed], params):
                    tokens += event.token_ids
        return tokens

    return asyncio.run(write())


@pytest.mark.parametrize("mix", MIXES)
async def test_perplexity_of_a_trained_model_agrees(tmp_path, likely_text, mix):
    """The packaged model, quantised anew: llama.cpp's perplexity of the same texts, within half a percent."""
    layers = replace_block(DEMO_MODEL_PATH, tmp_path / "layers.gguf", None)
    path = quantise(layers, tmp_path / "demo.gguf", mix)
    async with Engine.open(path) as engine:
        ours = await perplexity(engine, likely_text, TEXT_TOKENS)
    with LlamaModel(path) as llama:
        theirs = llama_perplexity(llama, likely_text, TEXT_TOKENS)
    print(f"{mix}: ours {ours.perplexity:.4f}, llama.cpp {theirs:.4f}")  # noqa: T201 - shown by -s
    assert abs(ours.perplexity / theirs - 1) <= MAX_RELATIVE_DIFFERENCE, (ours, theirs)


async def test_a_split_model_may_stay_split(workshop, tmp_path):
    """The quantiser's several files give the logits of its single one, to the bit."""
    case = next(case for case in OTHER_CASES if case.name == "qwen2moe_split")
    source = workshop.converted(case)[1]
    single = quantise(source, tmp_path / "single.gguf", "Q8_0")
    quantise(source, tmp_path / "parts", "Q8_0", keep_split=True)
    parts = sorted(tmp_path.glob("parts-*-of-*.gguf"))
    assert len(parts) > 2
    logits = []
    for path in (single, parts[0]):
        async with Engine.open(path) as engine:
            logits.append(await prompt_logits(engine, prompt_ids(PROMPT_TOKENS)))
    assert np.array_equal(*logits)


# llama.cpp has no graph of GLM-5.3-Flash's.
WITH_BLOCK = [c for c in OTHER_CASES if c.tiny.extra_block and c.tiny.arch != "glm5_next"]


@pytest.mark.parametrize("case", WITH_BLOCK, ids=str)
def test_a_converted_block_guesses_as_in_llama_cpp(workshop, case):
    """What the converter writes of a block is read in its order."""
    compare_blocks(workshop.converted(case)[1])


@pytest.mark.parametrize(
    ("name", "arch"), [("whole_attention", "granitemoe"), ("dense_attention", "granite")]
)
def test_a_hybrid_without_recurrent_layers_is_another_architecture(workshop, name, arch):
    """Of Granite 4.0: the converter names the older ones, or cases of these names would prove nothing of them."""
    case = next(case for case in OTHER_CASES if case.name == f"granitehybrid_{name}")
    assert Keys(workshop.converted(case)[1]).arch == arch


def test_an_extra_block_is_written(workshop):
    """The cases with a block that guesses tokens have one in their files: else they would prove nothing."""
    for case in OTHER_CASES:
        if case.tiny.extra_block:
            names = decoded_weights(workshop.converted(case)[1])
            assert f"blk.{case.tiny.layers}.nextn.eh_proj.weight" in names


def test_a_block_of_deepseek4_is_written_in_a_file_of_its_own(workshop):
    """The converter leaves it out of the model's file, and writes it alone, with ends of its own, where it is asked."""
    (published,) = [case for case in PACKED_CASES if case.tiny.extra_block]
    assert not any("nextn" in name for name in decoded_weights(workshop.converted(published)[1]))
    tiny = TinyModel("deepseek_v4", layers=3, extra_block=True, packed=True, seed=5)
    path = workshop.converted(ToolCase("deepseek_v4_block", tiny, ("--mtp",)))[1]
    names = set(decoded_weights(path))
    ends = {f"output_hc_{part}.weight" for part in ("fn", "base", "scale")}
    ends |= {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert names >= ends
    assert {name.split(".")[1] for name in names - ends} == {"3"}
    assert Keys(path)("nextn_predict_layers") == 1
    assert Keys(path)("block_count") == 4
