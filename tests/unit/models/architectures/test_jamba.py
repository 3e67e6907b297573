"""What jamba's files say: which layers attend, which have experts, and what lies between a convolution and its scan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.recurrent_contract import SelectiveRule, SelectiveShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.spec import LayerKind

TOY = ToyArch("jamba", layers=4, interval=3, rank=5)
DENSE = replace(TOY, experts=0, used=0)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def changed(tmp_path, weights, toy=TOY, **metadata):
    keys = {f"jamba.{key}": value for key, value in metadata.items()}
    return write_toy_arch(tmp_path / "changed.gguf", toy, weights=weights, metadata=keys)


def test_tensors_and_heads_say_what_a_layer_is(tmp_path):
    """A layer without key heads keeps a state, one without a router has a dense feed-forward, and no head turns."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    spec = model.spec
    recurrent, attention = LayerKind.RECURRENT, LayerKind.ATTENTION
    assert spec.layer_kinds == (recurrent, recurrent, attention, recurrent)
    assert spec.recurrent == SelectiveShape(width=128, state_dim=16, rank=5, conv_width=4)
    assert spec.recurrent.state.numbers == (3 * 128, 16 * 128)
    assert [layer is not None for layer in model.expert_layers] == [False, True, False, True]
    assert spec.dense_intermediate_size == spec.expert_intermediate_size == 32
    assert model.non_expert.ropes == (None,) * 4


def test_weights_of_experts_are_a_softmax_over_all(tmp_path):
    """What is chosen is not normed."""
    layers = opened(write_toy_arch(tmp_path / "m.gguf", TOY)).non_expert.layers
    assert not layers[1].routed.rule.normalize
    assert layers[1].routed.rule.chosen == 2


def test_what_lies_between_the_convolution_and_the_scan(tmp_path):
    """One tensor holds the products of steps, B and C; decays are by row of the state, and negative."""
    path = write_toy_arch(tmp_path / "m.gguf", TOY)
    weights = toy_arch_weights(TOY)
    with open_model_file(path) as file:
        mixer = open_model(file, ReferenceKernels()).non_expert.layers[0].mixer
        rows = [part.rows for part in mixer.products.firsts]
        assert rows == [5, 16, 16]
        parts = np.concatenate([part.raw for part in mixer.products.firsts])
        assert np.array_equal(parts.view(np.float32), weights["blk.0.ssm_x.weight"])
        assert (mixer.products.steps.rows, mixer.products.steps.cols) == (128, 5)
        assert isinstance(mixer.rule, SelectiveRule)
        assert np.array_equal(mixer.rule.decay, weights["blk.0.ssm_a"].T)
        assert (mixer.rule.decay < 0).all()


@pytest.mark.parametrize("experts", [None, 0, 1])
def test_without_routers_a_model_is_dense(tmp_path, experts):
    """Files of a dense model say that there is one expert."""
    keys = {"expert_count": experts, "expert_used_count": experts}
    model = opened(changed(tmp_path, toy_arch_weights(DENSE), DENSE, **keys))
    assert model.expert_layers == (None,) * 4
    assert model.spec.dense_layers == {0, 1, 2, 3}


def test_experts_that_no_layer_has_are_refused(tmp_path):
    """A file that names eight, and lacks all routers."""
    keys = {"expert_count": 8, "expert_used_count": 2}
    path = changed(tmp_path, toy_arch_weights(DENSE), DENSE, **keys)
    with pytest.raises(ModelFileError, match="no layer has routed experts"):
        opened(path)


@pytest.mark.parametrize(
    "name",
    [
        *("ssm_in.weight", "ssm_conv1d.weight", "ssm_x.weight", "ssm_dt.weight", "ssm_dt.bias"),
        *("ssm_dt_norm.weight", "ssm_b_norm.weight", "ssm_c_norm.weight"),
        *("ssm_a", "ssm_d", "ssm_out.weight", "ffn_norm.weight", "ffn_down.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    """Of a layer with a state and a dense feed-forward; a convolution may lack its bias, which then is zero."""
    weights = toy_arch_weights(TOY)
    del weights[f"blk.0.{name}"]
    with pytest.raises(ModelFileError, match=rf"blk\.0\.{name}"):
        opened(changed(tmp_path, weights))


def test_a_convolution_may_lack_its_bias(tmp_path):
    """Zeros stand for it."""
    weights = toy_arch_weights(TOY)
    del weights["blk.0.ssm_conv1d.bias"]
    first, second = (
        layer.mixer.rule.conv_bias
        for layer in opened(changed(tmp_path, weights)).non_expert.layers[:2]
    )
    assert not first.any()
    assert np.array_equal(second, weights["blk.1.ssm_conv1d.bias"])


@pytest.mark.parametrize("name", ["ssm_in.bias", "ssm_out.bias", "ssm_norm.weight"])
def test_a_tensor_without_a_place_is_refused(tmp_path, name):
    """Products with biases are in no published model; the last is Mamba2's."""
    weights = toy_arch_weights(TOY)
    weights[f"blk.0.{name}"] = np.ones(64, np.float32)
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.{name}"):
        opened(changed(tmp_path, weights))


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("ssm.inner_size", 64, "ssm_conv1d"),
        ("ssm.state_size", 8, "ssm_a"),
        ("ssm.time_step_rank", 4, "ssm_x"),
        ("ssm.conv_kernel", 3, "ssm_conv1d"),
    ],
)
def test_sizes_that_tensors_do_not_have_are_refused(tmp_path, key, value, name):
    """The error names the tensor."""
    with pytest.raises(ModelFileError, match=name):
        opened(changed(tmp_path, toy_arch_weights(TOY), **{key: value}))
