"""Files of llama.cpp's converter and quantiser, which we did not write, against stored answers of transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.converted_files import (
    CONVERTED_FOLDER,
    TEXT,
    position_errors,
    read_expected,
)
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.golden_files import LOGITS_ROWS
from tests.support.oracle_cases import ANSWER_TOKENS, LONGEST_PROMPT, prompt_ids
from thermocline.cli.info import inspect
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import ARCHITECTURES

pytestmark = pytest.mark.slow

EXPECTED = read_expected()
PLAIN = [name for name, (facts, _) in EXPECTED.items() if "tokens" in facts]
MIXED = [name for name in EXPECTED if name not in PLAIN]
BOTH = ("laguna", "olmoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next")
MAX_TIMES_LLAMA = 3.0
SHORT = 8


def test_every_architecture_is_there():
    """A file in float32 and a quantised one of six architectures, as many as are described, and no large ones.

    The others are converted under `make oracle`; of some a file in float32 is here, too.
    """
    files = {path.name: path.stat().st_size for path in CONVERTED_FOLDER.glob("*.gguf")}
    assert set(files) == set(EXPECTED)
    for names in (PLAIN, MIXED):
        found = {name.rpartition("-")[0] for name in names}
        assert set(BOTH) <= found <= set(ARCHITECTURES)
    assert sum(files.values()) < 8 << 20
    formats = {name for facts, _ in EXPECTED.values() for name in facts["formats"]}
    assert {"Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q2_K", "MXFP4", "Q8_0", "F32"} <= formats
    assert {"Q5_0", "IQ4_NL", "Q5_1", "Q4_0"} & formats, "no file has what rows of 32 fall back to"


@pytest.mark.parametrize("name", PLAIN)
async def test_a_float32_file_answers_as_transformers(name):
    """Logits of the prompt, and 64 greedy tokens."""
    facts, expected = EXPECTED[name]
    ids = prompt_ids(LONGEST_PROMPT)
    assert len(facts["tokens"]) == ANSWER_TOKENS
    async with Engine.open(CONVERTED_FOLDER / name, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
        assert_within(ours[list(LOGITS_ROWS)], expected, "transformers/F32")
        assert await greedy_tokens(engine, ids, ANSWER_TOKENS) == facts["tokens"]


@pytest.mark.parametrize("name", MIXED)
async def test_a_quantised_file_is_as_near_as_in_llama_cpp(name):
    """The middle position's error is at most three times what llama.cpp's was on the same file."""
    facts, expected = EXPECTED[name]
    async with Engine.open(CONVERTED_FOLDER / name, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, prompt_ids(LONGEST_PROMPT))
    error = np.median(position_errors(ours[list(LOGITS_ROWS)], expected))
    assert error <= MAX_TIMES_LLAMA * facts["llama_cpp_error"]


@pytest.mark.parametrize("name", MIXED)
async def test_the_reference_is_exact_on_quantised_files(name):
    """Kernels that round nothing give transformers' logits from the values that the weights decode to."""
    _, expected = EXPECTED[name]
    settings = EngineConfig(kernels="reference", memory=EXACT_CACHE)
    async with Engine.open(CONVERTED_FOLDER / name, settings) as engine:
        ours = await prompt_logits(engine, prompt_ids(LONGEST_PROMPT)[:SHORT])
    rows = [row for row in LOGITS_ROWS if row < SHORT]
    assert_within(ours[rows], expected[: len(rows)], "transformers/mixed")


@pytest.mark.parametrize("name", EXPECTED)
async def test_text_becomes_the_same_tokens(name):
    """The vocabulary that the converter wrote gives the ids that llama.cpp has for a text."""
    facts, _ = EXPECTED[name]
    async with Engine.open(CONVERTED_FOLDER / name) as engine:
        assert await engine.encode(TEXT, parse_special=False) == facts["text_ids"]


@pytest.mark.parametrize("name", EXPECTED)
def test_info_says_that_it_runs(name):
    """Nothing is in the way, and the formats are those that the gguf package reads."""
    facts, _ = EXPECTED[name]
    with open_model_file(CONVERTED_FOLDER / name) as file:
        seen = inspect(file)
        found = {tensor.format.name for tensor in file.tensors.values()}
    assert seen.unsupported == ()
    assert sorted(found) == facts["formats"]
    assert (seen.block_bytes > 0) == (name == "qwen35moe-F32.gguf")
