"""What layers with a window and layers that see all tokens have of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_next_block import write_drafting_toy
from thermocline.errors import ModelFileError
from thermocline.kernels.dense_contract import Temperature
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.whole_layer import HandedOn
from thermocline.modelfile.reader import open_model_file
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.registry import open_model, open_next_blocks
from thermocline.models.rope import RopeRule, Yarn
from thermocline.models.spec import LayerKind


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_exaone_turns_where_it_has_a_window(tmp_path):
    """Every fourth layer sees all tokens and does not turn; blocks behind the last layer are in no pattern."""
    toy = ToyArch("exaone-moe", layers=5, window=16)
    rope = RopeRule(16, 10000.0)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    assert model.spec.window == WindowSpec(16, rope)
    assert model.non_expert.ropes == (rope, rope, rope, None, rope)
    keys = {"exaone-moe.nextn_predict_layers": 1, "exaone-moe.block_count": 6}
    keys["exaone-moe.attention.sliding_window_pattern"] = [False, True, True, True, False]
    model = opened(write_toy_arch(tmp_path / "n.gguf", toy, metadata=keys))
    assert (model.spec.num_layers, model.spec.num_predict_layers) == (5, 1)
    assert model.non_expert.ropes == (None, rope, rope, rope, None)


def test_cohere_turns_where_it_has_a_window_or_is_dense(tmp_path):
    """The first of four layers sees all tokens; it turns where it has no routed experts, and so does the block behind."""
    toy = ToyArch("cohere2moe", layers=9, window=16, shared=64)
    rope = RopeRule(16, 10000.0, pairs=True)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    assert model.spec.window is not None
    assert model.spec.window.num_tokens == 16
    assert model.non_expert.ropes == (rope, rope, rope, rope, None, rope, rope, rope, None)
    kinds = [LayerKind.WINDOW if n % 4 else LayerKind.ATTENTION for n in range(9)]
    assert list(model.spec.layer_kinds) == kinds
    model = opened(write_toy_arch(tmp_path / "n.gguf", replace(toy, dense=0)))
    assert model.non_expert.ropes[:2] == (None, rope)
    path = write_drafting_toy(tmp_path / "o.gguf", toy)
    with open_model_file(path) as file:
        (block,) = open_next_blocks(file, ReferenceKernels())
    assert block._layer.rope == rope
    assert block._layer.parts.handed_on is HandedOn.NORMED
    assert block._layer.parts.mixer.window == 0


def test_cohere_adds_the_mean_of_routed_and_shared_experts(tmp_path):
    """Halves of both, where there are both; all of a dense layer's; norms take the mean off by the key that there is."""
    toy = ToyArch("cohere2moe", layers=2, window=16, shared=64, extra={"expert_weights_scale": 3.0})
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    dense, mixed = model.non_expert.layers
    assert mixed.routed.rule.scale == 1.5
    assert mixed.shared.stack.down.scales.tolist() == [0.5]
    assert dense.shared.stack.down.scales is None
    assert dense.handed_on is mixed.handed_on is HandedOn.NORMED
    assert dense.mixer.centering is not None
    lone = opened(write_toy_arch(tmp_path / "n.gguf", replace(toy, shared=0)))
    assert lone.non_expert.layers[1].routed.rule.scale == 3.0
    keys = {"cohere2moe.attention.layer_norm_rms_epsilon": 1e-5}
    plain = opened(write_toy_arch(tmp_path / "o.gguf", toy, metadata=keys))
    assert plain.non_expert.layers[0].mixer.centering is None


def test_mellum_stretches_layers_that_see_all(tmp_path):
    """A scaled rotary embedding is that of layers without a window alone, which all are where the file has none."""
    scaled = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    toy = replace(ToyArch("mellum", layers=5, window=16), extra=scaled)
    near, far = (
        RopeRule(16, 10000.0, scaling)
        for scaling in (None, Yarn(4.0, 64, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0))
    )
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    assert model.non_expert.ropes == (near, near, near, far, near)
    model = opened(write_toy_arch(tmp_path / "n.gguf", replace(toy, window=0)))
    assert model.non_expert.ropes == (far,) * 5
    assert model.spec.window is None


def test_llama4_has_chunks_where_it_turns(tmp_path):
    """Every fourth layer sees all tokens, by scores that grow; the others norm what they turned, but for Maverick's."""
    toy = ToyArch("llama4", layers=5, used=1, dense=1)
    rope, usual = RopeRule(16, 10000.0, pairs=True), Temperature(0.1, 8192, 1)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    assert model.spec.window == WindowSpec(8192, RopeRule(16, 10000.0), chunked=True)
    assert model.non_expert.ropes == (rope, rope, rope, None, rope)
    mixers = [parts.mixer for parts in model.non_expert.layers]
    assert [mixer.temperature for mixer in mixers] == [None, None, None, usual, None]
    assert [(mixer.window, mixer.chunked) for mixer in mixers[2:4]] == [(8192, True), (0, False)]
    norms = [mixer.head_norm for mixer in mixers[2:4]]
    assert norms[0].last
    assert norms[0].q_gain.tolist() == norms[0].k_gain.tolist() == [1.0] * 16
    assert norms[1].q_gain is norms[1].k_gain is None
    routed = [parts.routed for parts in model.non_expert.layers]
    assert [n for n, each in enumerate(routed) if each and each.weighs_input] == [1, 3]
    toy = replace(toy, experts=128, intermediate=8)
    mixers = [p.mixer for p in opened(write_toy_arch(tmp_path / "n.gguf", toy)).non_expert.layers]
    assert all(mixer.head_norm.q_gain is None for mixer in mixers)


def test_llama4_may_say_its_chunks_and_temperature(tmp_path):
    """Files of other sizes than the published ones; a scale of 0 is no temperature."""
    keys = {"attention.temperature_scale": 0.25, "attention.temperature_length": 12}
    toy = ToyArch("llama4", layers=4, used=1, window=24, extra=keys)
    spec = opened(write_toy_arch(tmp_path / "m.gguf", toy)).spec
    assert spec.temperature == Temperature(0.25, 12, 1)
    assert spec.window.num_tokens == 24
    none = {"llama4.attention.temperature_scale": 0.0}
    assert opened(write_toy_arch(tmp_path / "n.gguf", toy, metadata=none)).spec.temperature is None


def test_mistral3_grows_with_the_original_context(tmp_path):
    """Its multiplier takes YaRN's factor away; without a multiplier the factor stays, and without a scale no score grows."""
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    usual, prefix = 0.1 * math.log(4.0) + 1.0, "mistral3.rope.scaling."
    heat = {"mistral3.attention.temperature_scale": 0.125}
    for added, magnitude, expected in (
        (heat | {f"{prefix}yarn_log_multiplier": 1.0}, 1.0, Temperature(0.125, 64)),
        ({f"{prefix}yarn_log_multiplier": 1.0, f"{prefix}yarn_attn_factor": 0.9}, 0.9, None),
        ({}, usual, None),
    ):
        toy = ToyArch("mistral3", experts=0, used=0, biased=False, extra=yarn)
        model = opened(write_toy_arch(tmp_path / "m.gguf", toy, metadata=added))
        assert model.spec.rope_scaling.magnitude == pytest.approx(magnitude)
        assert {parts.mixer.temperature for parts in model.non_expert.layers} == {expected}


@pytest.mark.parametrize("arch", ["deepseek2", "mistral4"])
def test_a_temperature_of_latent_attention_has_a_length(tmp_path, arch):
    """Mistral's factor of late queries, which begins anew with each length; one without it is an error."""
    toy = ToyArch(arch, head_dim=24, rotary=8, query_rank=48, biased=False)
    keys = {
        f"{arch}.attention.temperature_scale": 0.125,
        f"{arch}.attention.temperature_length": 64,
    }
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy, metadata=keys))
    found = {parts.mixer.temperature for parts in model.non_expert.layers}
    assert found == {Temperature(0.125, 64)}
    del keys[f"{arch}.attention.temperature_length"]
    with pytest.raises(ModelFileError, match="temperature_length"):
        opened(write_toy_arch(tmp_path / "n.gguf", toy, metadata=keys))
