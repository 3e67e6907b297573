"""What granitehybrid's files say besides their kinds of layers: factors, widths, and what turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.recurrent_contract import MambaShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.rope import RopeRule
from thermocline.models.spec import LayerKind

TOY = ToyArch("granitehybrid", layers=4, interval=3)
DENSE = replace(TOY, experts=0, used=0)
ALL_TURN = {"granitehybrid.rope.scaling.finetuned": True}


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_layers_are_mamba_where_no_head_has_keys(tmp_path):
    """Two layers with states, one that attends, and a feed-forward in all of them."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    spec = model.spec
    recurrent, attention = LayerKind.RECURRENT, LayerKind.ATTENTION
    assert spec.layer_kinds == (recurrent, recurrent, attention, recurrent)
    assert spec.recurrent == MambaShape(heads=4, head_dim=32, groups=2, state_dim=16, conv_width=4)
    assert all(layer is not None for layer in model.expert_layers)
    assert all(layer.shared is not None for layer in model.non_expert.layers)
    assert model.non_expert.ropes == (None,) * 4


def test_the_factors_are_where_they_apply(tmp_path):
    """On scores, embeddings and logits, and on what mixers of both kinds, experts and the shared expert add."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    spec = model.spec
    assert (spec.attention_scale, spec.embedding_scale) == (pytest.approx(0.3), 2.5)
    assert spec.logit_scale == pytest.approx(1 / 0.75)
    for layer in model.non_expert.layers:
        assert layer.mixer.output.scale == pytest.approx(0.4)
        assert layer.routed.rule.scale == pytest.approx(0.4)
        assert layer.shared.stack.down.scales == pytest.approx([0.4])
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    for value in (None, 0.0):
        keys = {f"granitehybrid.{name}": value for name in names}
        model = opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=keys))
        spec = model.spec
        assert (spec.attention_scale, spec.embedding_scale) == (0.25, 1.0)
        assert (spec.residual_scale, spec.logit_scale) == (1.0, 1.0)
        assert model.non_expert.layers[0].mixer.output.scale == 1.0


@pytest.mark.parametrize("stated", [48, 31])
def test_without_experts_the_shared_width_counts(tmp_path, stated):
    """A dense feed-forward is the model's shared expert: its width is that one's, whatever the usual key says."""
    keys = {"granitehybrid.feed_forward_length": stated}
    model = opened(write_toy_arch(tmp_path / "m.gguf", DENSE, metadata=keys))
    assert model.spec.dense_intermediate_size == 48
    assert model.expert_layers == (None,) * 4
    keys = {"granitehybrid.expert_shared_feed_forward_length": None}
    model = opened(write_toy_arch(tmp_path / "n.gguf", DENSE, metadata=keys))
    assert model.spec.dense_intermediate_size == 48


def test_a_biased_feed_forward_is_refused_beside_a_factor(tmp_path):
    """No model has both; without the factor the biases are read."""
    weights = toy_arch_weights(DENSE)
    weights["blk.1.ffn_down.bias"] = np.ones(64, np.float32)
    path = write_toy_arch(tmp_path / "m.gguf", DENSE, weights=weights)
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_down"):
        opened(path)
    keys = {"granitehybrid.residual_scale": None}
    path = write_toy_arch(tmp_path / "n.gguf", DENSE, weights=weights, metadata=keys)
    assert opened(path).non_expert.layers[1].shared.stack.biases is not None


def test_heads_turn_where_the_file_says_so(tmp_path):
    """Whole heads, in the layers that attend; heads that turn in part are refused, as are files that do not say it."""
    rope = RopeRule(16, 10000.0, pairs=True)
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, metadata=ALL_TURN))
    assert model.non_expert.ropes == (None, None, rope, None)
    part = ALL_TURN | {"granitehybrid.rope.dimension_count": 8}
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count = 8"):
        opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=part))
    nothing = {"granitehybrid.rope.scaling.finetuned": None}
    with pytest.raises(ModelFileError, match=r"rope\.scaling\.finetuned"):
        opened(write_toy_arch(tmp_path / "o.gguf", TOY, metadata=nothing))


def test_a_convolution_may_lack_its_bias(tmp_path):
    """Zeros stand for it."""
    weights = toy_arch_weights(TOY)
    del weights["blk.0.ssm_conv1d.bias"]
    path = write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights)
    first, second = (layer.mixer.rule.conv_bias for layer in opened(path).non_expert.layers[:2])
    assert not first.any()
    assert np.array_equal(second, weights["blk.1.ssm_conv1d.bias"])
