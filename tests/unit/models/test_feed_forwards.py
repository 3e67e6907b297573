"""Layers without routed experts wherever they are, and shared experts as wide as their tensors.

The judge of a dense layer is a routed one of a single expert, whose weight is one: both are the same feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.compare import assert_within
from tests.support.engine_runs import EXACT_CACHE, prompt_logits
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.config import EngineConfig, PlacementConfig
from thermocline.engine.api import Engine
from thermocline.errors import ModelFileError
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model, read_spec

_ONE = {"layers": 4, "experts": 1, "used": 1, "dense": 0}
TOYS = {
    "ernie4_5-moe": ToyArch("ernie4_5-moe", **_ONE),
    "deepseek2": ToyArch("deepseek2", **_ONE, head_dim=24, rotary=8, biased=False),
}
WIDTH = "feed_forward_length"


def spec_of(path):
    with open_model_file(path) as file:
        return read_spec(file)


def as_dense(weights, layers):
    """The same tensors, with the single expert of `layers` as a feed-forward for every token."""
    found = dict(weights)
    for layer in layers:
        start = f"blk.{layer}.ffn_"
        for role in ("gate", "up"):
            found[f"{start}{role}.weight"] = found.pop(f"{start}{role}_exps.weight")[0]
        found[f"{start}down.weight"] = found.pop(f"{start}down_exps.weight")[0]
        for name in list(found):
            if name.startswith((f"{start}gate_inp", f"blk.{layer}.exp_probs")) or (
                name.startswith(start) and "_shexp" in name
            ):
                del found[name]
    return found


def as_dense_of_many(weights, layers):
    """The same tensors, with the first expert of `layers` as a feed-forward for every token."""
    first = {name: values[:1] if "_exps" in name else values for name, values in weights.items()}
    dense = as_dense(first, layers)
    return {name: weights[name] if "_exps" in name else values for name, values in dense.items()}


def silent_shared(weights, layers):
    """The same tensors, with shared experts that add nothing in `layers`."""
    return {
        name: values * 0
        if "ffn_down_shexp" in name and int(name.split(".")[1]) in layers
        else values
        for name, values in weights.items()
    }


async def logits_of(path, **settings: Any):
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE, **settings)) as engine:
        return await prompt_logits(engine, prompt_ids(24))


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("arch", TOYS)
async def test_a_dense_layer_between_routed_ones(tmp_path, arch, kernels):
    """Layers 1 and 3 are dense, as moe_layer_interval or mlp_layer_types may say."""
    toy, layers = TOYS[arch], (1, 3)
    weights = silent_shared(toy_arch_weights(toy), layers)
    dense = as_dense(weights, layers)
    keys = {f"{arch}.{WIDTH}": toy.intermediate}
    mixed = write_toy_arch(tmp_path / "mixed.gguf", toy, weights=dense, metadata=keys)
    routed = write_toy_arch(tmp_path / "routed.gguf", toy, weights=weights, metadata=keys)
    assert spec_of(mixed).dense_layers == set(layers)
    assert not spec_of(routed).dense_layers
    expected = await logits_of(routed, kernels=kernels)
    assert_within(await logits_of(mixed, kernels=kernels), expected, "reference/float32")


DEVICE = PlacementConfig(
    trunk_device="torch-cpu", hot_device="torch-cpu", expert_cache="static", hot_fraction=1.0
)


HYBRIDS = {
    arch: ToyArch(arch, layers=4, experts=4, rotary=8, interval=2, value_state=24)
    for arch in ("qwen3next", "qwen35moe")
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["ernie4_5-moe", "deepseek2", "qwen3next", "qwen35moe"])
async def test_a_device_computes_them_too(tmp_path, arch):
    """Dense layers between routed ones, and states that are not square, on torch's CPU with all experts there."""
    pytest.importorskip("torch")
    toy, keys = HYBRIDS.get(arch) or replace(TOYS[arch], experts=4, used=2), {}
    weights = toy_arch_weights(toy)
    if arch not in HYBRIDS:
        weights = as_dense_of_many(weights, (1, 2))
        keys = {f"{arch}.{WIDTH}": toy.intermediate}
    path = write_toy_arch(tmp_path / "m.gguf", toy, weights=weights, metadata=keys)
    expected = await logits_of(path, kernels="reference")
    found = await logits_of(path, kernels="native", placement=DEVICE)
    assert_within(found, expected, "non-expert/float32")


def test_first_layers_may_be_dense_without_a_word(tmp_path):
    """Two first layers without experts are told as other leading ones are."""
    toy = TOYS["ernie4_5-moe"]
    weights = as_dense(toy_arch_weights(toy), (0, 1))
    keys = {f"ernie4_5-moe.{WIDTH}": toy.intermediate}
    spec = spec_of(write_toy_arch(tmp_path / "m.gguf", toy, weights=weights, metadata=keys))
    assert (spec.num_dense_layers, spec.own_dense_layers) == (2, ())
    assert spec.dense_intermediate_size == toy.intermediate


def test_what_no_layer_has_is_missing(tmp_path):
    """A model of routed experts none of whose layers has any is damaged, and so is a layer with neither."""
    toy = TOYS["ernie4_5-moe"]
    weights = as_dense(toy_arch_weights(toy), range(toy.layers))
    path = write_toy_arch(tmp_path / "m.gguf", toy, weights=weights)
    with pytest.raises(ModelFileError, match="no layer has routed experts"):
        spec_of(path)
    weights = toy_arch_weights(toy)
    del weights["blk.2.ffn_gate_inp.weight"]
    path = write_toy_arch(tmp_path / "n.gguf", toy, weights=weights)
    with (
        open_model_file(path) as file,
        pytest.raises(ModelFileError, match=r"blk\.2\.ffn_gate_inp"),
    ):
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize(
    ("arch", "key", "stated"),
    [
        # Two experts of 32, and what the converter makes of it.
        ("bailingmoe2", "expert_shared_feed_forward_length", 64),
        # intermediate_size // num_key_value_heads.
        ("ernie4_5-moe", "expert_shared_feed_forward_length", 24),
        # Not written before May 2024.
        ("qwen2moe", "expert_shared_feed_forward_length", None),
    ],
)
def test_a_shared_expert_is_as_wide_as_its_tensors(tmp_path, arch, key, stated):
    """Where the converter's key is another number, or is not there."""
    toy = ToyArch(arch, rotary=8 if arch == "bailingmoe2" else 16)
    path = write_toy_arch(tmp_path / "m.gguf", toy, metadata={f"{arch}.{key}": stated})
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
    width = {"qwen2moe": toy.shared}.get(arch, 2 * toy.intermediate)
    assert model.spec.shared_intermediate_size == width
    assert model.non_expert.layers[2].shared.stack.up.raw.shape[1] == width


@pytest.mark.parametrize("kernels", ["native", "reference"])
async def test_latent_attention_without_routed_experts(tmp_path, kernels):
    """Youtu-LLM is deepseek2 whose layers are all dense; its file names no number of experts."""
    toy = TOYS["deepseek2"]
    weights = silent_shared(toy_arch_weights(toy), range(toy.layers))
    keys = {f"deepseek2.{WIDTH}": toy.intermediate}
    routed = write_toy_arch(tmp_path / "routed.gguf", toy, weights=weights, metadata=keys)
    keys |= {"deepseek2.leading_dense_block_count": toy.layers}
    keys |= {f"deepseek2.expert_{key}": None for key in ("count", "used_count")}
    keys |= {"deepseek2.expert_shared_count": 0}
    dense = write_toy_arch(
        tmp_path / "dense.gguf",
        toy,
        weights=as_dense(weights, range(toy.layers)),
        metadata=keys,
    )
    assert not spec_of(dense).has_experts
    expected = await logits_of(routed, kernels=kernels)
    assert_within(await logits_of(dense, kernels=kernels), expected, "reference/float32")


@pytest.mark.parametrize("arch", HYBRIDS)
async def test_states_need_not_be_square(tmp_path, arch):
    """Value heads of 24 beside key heads of 16: native kernels against the twin's, and the state's size."""
    toy = HYBRIDS[arch]
    path = write_toy_arch(tmp_path / "m.gguf", toy)
    spec = spec_of(path)
    assert spec.recurrent.state.heads == (toy.value_heads, toy.state, 24)
    expected = await logits_of(path, kernels="reference")
    assert_within(await logits_of(path, kernels="native"), expected, "reference/float32")
