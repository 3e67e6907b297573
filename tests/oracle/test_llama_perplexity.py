"""Perplexity against llama.cpp on the same file and text, by a definition written down twice."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp")

from scripts.demo_model.export import replace_block
from tests.oracle.llama_model import LlamaModel, llama_perplexity, write_float32_twin
from tests.support.engine_runs import EXACT_CACHE
from tests.support.oracle_cases import ALL_CASES, prompt_ids, write_case
from thermocline.config import EngineConfig
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH
from thermocline.engine.api import Engine
from thermocline.engine.scoring import perplexity

pytestmark = pytest.mark.oracle

MAX_RELATIVE_DIFFERENCE = 0.005
# llama.cpp rounds the activations of quantised files; on a float32 file only noise is left.
MAX_RELATIVE_DIFFERENCE_FLOAT = 1e-6


@pytest.mark.parametrize("window_tokens", [64, 512])
async def test_the_demo_model_agrees(tmp_path, window_tokens):
    """The packaged model gives its held-out text llama.cpp's perplexity, within half a percent."""
    text = DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8")
    async with Engine.open(DEMO_MODEL_PATH) as engine:
        token_ids = await engine.encode(text, parse_special=False)
        ours = await perplexity(engine, token_ids, window_tokens)
    with LlamaModel(replace_block(DEMO_MODEL_PATH, tmp_path / "layers.gguf", None)) as llama:
        assert llama.encode(text) == token_ids
        theirs = llama_perplexity(llama, token_ids, window_tokens)
    assert abs(ours.perplexity / theirs - 1) <= MAX_RELATIVE_DIFFERENCE, (ours, theirs)


@pytest.mark.parametrize("name", ["default", "F16_default", "Q8_0", "mixed"])
async def test_toy_models_agree(tmp_path, name):
    """Windows and a short last one agree to float noise where llama.cpp has the weights in float32.

    (Random weights find any text so unlikely that rounded activations alone move its perplexity by more
    than half a percent.)
    """
    case = next(case for case in ALL_CASES if case.name == name)
    path = write_case(tmp_path / "model.gguf", case)
    wide = write_float32_twin(tmp_path / "float32.gguf", case, path)
    token_ids = prompt_ids(450)
    async with Engine.open(
        path, EngineConfig(kernels=case.exact_kernels, memory=EXACT_CACHE)
    ) as engine:
        ours = await perplexity(engine, token_ids, 128)
    with LlamaModel(wide) as llama:
        theirs = llama_perplexity(llama, token_ids, 128)
    assert abs(ours.perplexity / theirs - 1) <= MAX_RELATIVE_DIFFERENCE_FLOAT, (ours, theirs)
