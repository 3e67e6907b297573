"""What Kimi Linear's files say: which layers keep a state, how it decays, and that no head turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.whole_layer import DeltaWeights, LatentWeights
from thermocline.modelfile.reader import open_model_file
from thermocline.models.layers import RotaryTable
from thermocline.models.registry import open_model, read_spec

TOY = ToyArch("kimi-linear", layers=5, interval=2, head_dim=24, rotary=8)


def layers_of(path):
    """Return the dimensions, the layers, and the rotary rule of each."""
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
        return model.spec, model.non_expert.layers, model.non_expert.ropes


def test_layers_without_heads_of_keys_keep_a_state(tmp_path):
    """The others keep one row per token; a state has as many heads as attention, and decays row by row."""
    spec, layers, ropes = layers_of(write_toy_arch(tmp_path / "m.gguf", TOY))
    assert spec.recurrent_layers == (0, 2, 4)
    assert [type(layer.mixer) for layer in layers] == [DeltaWeights, LatentWeights] * 2 + [
        DeltaWeights
    ]
    assert [rope is None for rope in ropes] == [True, False] * 2 + [True]
    assert spec.state.num_bytes == 4 * (3 * 3 * 64 + 4 * 16 * 16)
    rule = layers[0].mixer.rule
    assert rule.shape.by_channel
    assert rule.sigmoid_gate
    assert (rule.step_bias.shape, rule.decay.shape) == ((64,), (4,))
    assert (spec.head_dim, spec.latent.key_dim, spec.latent.turned) == (40, 24, 8)


def test_no_head_turns(tmp_path):
    """Cosines are ones and sines zeros at any position, and scores have no factor but the usual one."""
    spec, _, ropes = layers_of(write_toy_arch(tmp_path / "m.gguf", TOY))
    table = RotaryTable(ReferenceKernels().dense, ropes[1]).at(np.array([0, 7, 5000], np.int32))
    assert (table.cosines == 1.0).all()
    assert not table.sines.any()
    assert table.cosines.shape == (3, 4)
    assert spec.attention_scale == pytest.approx(24**-0.5)


def test_convolutions_of_queries_keys_and_values_are_one(tmp_path):
    """Their channels follow each other, the oldest token's numbers first."""
    weights = toy_arch_weights(TOY)
    _, layers, _ = layers_of(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))
    conv = layers[2].mixer.rule.conv
    for part, name in enumerate("qkv"):
        given = weights[f"blk.2.ssm_conv1d_{name}.weight"].reshape(64, 4)
        np.testing.assert_array_equal(conv[:, 64 * part : 64 * (part + 1)].T, given)


def test_files_of_old_converters_have_as_many_heads_of_keys(tmp_path):
    """Keys and values of latent heads in one tensor: the same dimensions."""
    old = replace(TOY, joined=True)
    new_spec, _, _ = layers_of(write_toy_arch(tmp_path / "new.gguf", TOY))
    old_spec, _, _ = layers_of(write_toy_arch(tmp_path / "old.gguf", old))
    assert replace(old_spec, name=new_spec.name) == new_spec


def test_a_tensor_of_another_size_is_named(tmp_path):
    """A state of other heads than attention's: the tensor and both shapes."""
    weights = toy_arch_weights(TOY)
    weights["blk.0.ssm_a"] = weights["blk.0.ssm_a"][:, :, :3]
    path = write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights)
    with pytest.raises(ModelFileError, match="ssm_a"):
        layers_of(path)


def test_weights_of_chosen_experts_are_divided_by_their_sum(tmp_path):
    """Unless a file says otherwise, which no converter writes."""
    for stated, expected in ((None, True), (True, True), (False, False)):
        keys = {"kimi-linear.expert_weights_norm": stated}
        with open_model_file(write_toy_arch(tmp_path / "m.gguf", TOY, metadata=keys)) as file:
            assert read_spec(file).router.normalize_top_k is expected
