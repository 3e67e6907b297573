"""Phi-3.5-MoE in llama.cpp, whose graph is not the model's: what it computes alike, and what it computes otherwise.

Its norms keep the mean, and it weighs a token's two experts by softmaxes that sum to one. Where neither shows, its logits are
ours: where the mean of the residual stream is zero, and all experts are one, of which llama.cpp's file has the double.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.oracle.llama_model import LlamaModel
from tests.oracle.toolchain.tiny_hf import TinyModel
from tests.oracle.toolchain.tiny_norms import PHIMOE_WIDE
from tests.oracle.toolchain.tool_cases import ToolCase
from tests.oracle.toolchain.workshop import MIXES, Workshop, open_exact
from tests.support.compare import assert_within, nmse
from tests.support.engine_runs import EXACT_CACHE, prompt_logits
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model

pytestmark = pytest.mark.oracle

CONTEXT = 512
FAR = 1e-3


def toy_of(original: int) -> ToyArch:
    """A toy whose context was so long before it was stretched."""
    extra = {"rope.scaling.original_context_length": original}
    return ToyArch("phimoe", experts=4, stretched=True, context=CONTEXT, extra=extra, seed=331)


def without_means(weights: dict[str, np.ndarray]) -> None:
    """What is added to the residual stream has a mean of zero."""
    for name, values in weights.items():
        if name == "token_embd.weight" or name.endswith("attn_output.bias"):
            values -= values.mean(axis=-1, keepdims=True)
        elif name.endswith(("attn_output.weight", "ffn_down_exps.weight")):
            values -= values.mean(axis=-2, keepdims=True)


def alike(weights: dict[str, np.ndarray]) -> None:
    """All experts of a layer are one, and their logits are far apart: multiples of one number."""
    for name, values in weights.items():
        if "_exps." in name:
            values[:] = values[:1]
        elif name.endswith("ffn_gate_inp.weight"):
            bias = weights[name.replace("ffn_gate_inp.weight", "ffn_norm.bias")]
            values[:] = np.array([[1.0], [-2.0], [4.0], [-8.0]]) * bias / np.square(bias).sum()


async def error(
    folder, toy: ToyArch, weights: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return our logits, and llama.cpp's on a file whose experts give the double."""
    doubled = {
        name: values * 2 if name.endswith("ffn_down_exps.weight") else values
        for name, values in weights.items()
    }
    ids = prompt_ids(130)
    path = write_toy_arch(folder / "ours.gguf", toy, weights=weights)
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        ours = await prompt_logits(engine, ids)
    with LlamaModel(
        write_toy_arch(folder / "theirs.gguf", toy, weights=doubled), max_tokens=CONTEXT
    ) as llama:
        return ours, llama.logits(ids)


@pytest.mark.parametrize("original", [64, CONTEXT], ids=["long", "short"])
async def test_they_agree_where_neither_means_nor_weights_show(tmp_path, original):
    """Biases, both lists of factors, chosen by the context, and their magnitude are what they are to llama.cpp."""
    toy = toy_of(original)
    weights = toy_arch_weights(toy)
    without_means(weights)
    alike(weights)
    assert_within(*await error(tmp_path, toy, weights), "llama.cpp/F32")


@pytest.mark.parametrize("change", [without_means, alike], ids=["weights", "means"])
async def test_either_shows_alone(tmp_path, change):
    """Weights of other experts, and means that norms take off, are each enough for other logits."""
    toy = toy_of(64)
    weights = toy_arch_weights(toy)
    change(weights)
    assert nmse(*await error(tmp_path, toy, weights)) > FAR


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Files, made once each."""
    return Workshop(tmp_path_factory.mktemp("toolchain"))


@pytest.mark.parametrize("mix", MIXES)
async def test_quantised_files_are_what_their_weights_decode_to(workshop, mix):
    """Of llama.cpp's quantiser, which has no answer to compare: exact with kernels that round no activation."""
    tiny = TinyModel("phimoe", hidden=256, seed=7, options=PHIMOE_WIDE)
    path = workshop.quantised(ToolCase("phimoe_wide", tiny), mix)
    ids = prompt_ids(24)
    async with Engine.open(path, EngineConfig(kernels="reference", memory=EXACT_CACHE)) as engine:
        found = await prompt_logits(engine, ids)
    assert_within(found, open_exact(path).logits(ids), "transformers/mixed")


@pytest.mark.parametrize("original", [64, CONTEXT], ids=["long", "short"])
def test_angles_are_those_of_transformers(tmp_path, original):
    """Whose function takes the length of a sequence, which 5.23's model does not give it."""
    toy = toy_of(original)
    path = write_toy_arch(tmp_path / "m.gguf", toy)
    weights = toy_arch_weights(toy)
    config = transformers.PhimoeConfig(
        hidden_size=toy.hidden,
        num_attention_heads=toy.heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": original,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
            **{
                f"{which}_factor": weights[f"rope_factors_{which}.weight"].tolist()
                for which in ("short", "long")
            },
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=CONTEXT)
    with open_model_file(path) as file:
        rope = open_model(file, ReferenceKernels()).non_expert.ropes[0]
    np.testing.assert_allclose(rope.frequencies(), expected.numpy(), rtol=1e-6)
