"""What afmoe reads: which layers turn, what is the default, and where norms and gates are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError
from thermocline.kernels.dense_contract import Activation, Gating
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.registry import open_model
from thermocline.models.rope import RopeRule, Yarn

TOY = ToyArch("afmoe", layers=5, window=16)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_layers_turn_where_they_have_a_window(tmp_path):
    """Every fourth layer is full and does not turn, unless the file names others."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    rope = RopeRule(16, 10000.0)
    assert model.spec.window == WindowSpec(16, rope)
    assert model.non_expert.ropes == (rope, rope, rope, None, rope)
    assert [layer.mixer.window for layer in model.non_expert.layers] == [16, 16, 16, 0, 16]
    pattern = {"afmoe.attention.sliding_window_pattern": [False, True, True, True, False]}
    model = opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=pattern))
    assert model.non_expert.ropes == (None, rope, rope, rope, None)


def test_windows_may_have_their_own_base_and_be_scaled(tmp_path):
    """The base of windows comes before the common one, and scaling is theirs, since nothing else turns."""
    keys = {
        "afmoe.rope.freq_base_swa": 500.0,
        "afmoe.rope.scaling.type": "yarn",
        "afmoe.rope.scaling.factor": 4.0,
        "afmoe.rope.scaling.original_context_length": 128,
    }
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, metadata=keys))
    assert model.spec.window is not None
    scaling = Yarn(4.0, 128, 32.0, 1.0, pytest.approx(0.1 * np.log(4) + 1))
    assert model.spec.window.rope == RopeRule(16, 500.0, scaling)


def test_what_no_key_says_is_as_in_the_published_models(tmp_path):
    """Embeddings are scaled by the root of the width; chosen weights are normalised sigmoids."""
    keys = dict.fromkeys(("afmoe.expert_weights_norm", "afmoe.expert_gating_func"))
    spec = opened(write_toy_arch(tmp_path / "m.gguf", TOY, metadata=keys)).spec
    assert spec.embedding_scale == 8.0
    assert spec.router.normalize_top_k
    assert (spec.router.gating, spec.router.scale) == (Gating.SIGMOID, 1.5)
    assert (spec.num_dense_layers, spec.dense_intermediate_size) == (1, 64)
    keys = {"afmoe.expert_weights_norm": False}
    spec = opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=keys)).spec
    assert not spec.router.normalize_top_k


def test_every_part_is_normed_before_it_is_added(tmp_path):
    """Attention, a dense feed-forward, and the sum of shared and routed experts; the gate is a sigmoid."""
    weights = toy_arch_weights(TOY)
    layers = opened(write_toy_arch(tmp_path / "m.gguf", TOY)).non_expert.layers
    for index, layer in enumerate(layers):
        for norm, name in ((layer.mixer.post_norm, "post_attention"), (layer.end, "post_ffw")):
            assert norm.parts is None
            np.testing.assert_array_equal(norm.gain, weights[f"blk.{index}.{name}_norm.weight"])
        assert layer.mixer.gate.activation is Activation.SIGMOID
        assert (layer.routed is None) == (index == 0)
        assert layer.shared is not None


@pytest.mark.parametrize("name", ["attn_gate", "post_attention_norm", "post_ffw_norm"])
def test_a_missing_part_is_named(tmp_path, name):
    """A file without a gate or a norm is not a model of this kind."""
    weights = toy_arch_weights(TOY)
    del weights[f"blk.3.{name}.weight"]
    with pytest.raises(ModelFileError, match=rf"blk\.3\.{name}\.weight"):
        opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))
