"""What granite_swa's files list by layer, and what they have besides Granite's other files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.rope import RopeRule, Yarn
from thermocline.models.spec import LayerKind

TOY = ToyArch("granite_swa", layers=5, window=16)
DENSE = replace(TOY, experts=0, used=0)
ROPE = RopeRule(16, 10000.0, pairs=True)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_windows_and_turning_heads_are_listed_apart(tmp_path):
    """Any layer may have a window, and any may turn; all turn where the file does not say it."""
    near, far = LayerKind.WINDOW, LayerKind.ATTENTION
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    assert model.spec.layer_kinds == (far, near, near, near, far)
    assert model.non_expert.ropes == (ROPE,) * 5
    assert [parts.mixer.window for parts in model.non_expert.layers] == [0, 16, 16, 16, 0]
    keys = {
        "granite_swa.attention.sliding_window_pattern": [True, False, False, True, True],
        "granite_swa.attention.rope_pattern": [True, True, False, False, True],
    }
    model = opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=keys))
    assert model.spec.layer_kinds == (near, far, far, near, near)
    assert model.non_expert.ropes == (ROPE, ROPE, None, None, ROPE)


def test_no_layer_need_have_a_window_or_turn(tmp_path):
    """A window's size is not asked for then."""
    keys = {
        "granite_swa.attention.sliding_window": None,
        "granite_swa.attention.sliding_window_pattern": [False] * 5,
        "granite_swa.attention.rope_pattern": [False] * 5,
    }
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, metadata=keys))
    assert model.spec.window is None
    assert model.spec.window_layers == ()
    assert model.non_expert.ropes == (None,) * 5


def test_all_layers_are_stretched(tmp_path):
    """Scaling and factors of pairs are those of layers with a window, too; a base of their own is read."""
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    toy = replace(TOY, slowed=True, extra=keys)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy))
    (rope,) = set(model.non_expert.ropes)
    assert isinstance(rope.scaling, Yarn)
    assert len(rope.factors) == 8
    own = {"granite_swa.rope.freq_base_swa": 500.0}
    ropes = opened(write_toy_arch(tmp_path / "n.gguf", toy, metadata=own)).non_expert.ropes
    assert [each.base for each in ropes] == [10000.0, 500.0, 500.0, 500.0, 10000.0]


@pytest.mark.parametrize("toy", [TOY, DENSE], ids=["routed", "dense"])
def test_every_layer_has_sinks(tmp_path, toy):
    """As the model's own code; and the factor on what is added reaches the output's bias."""
    weights = toy_arch_weights(toy)
    mixers = [
        parts.mixer for parts in opened(write_toy_arch(tmp_path / "m.gguf", toy)).non_expert.layers
    ]
    for layer, mixer in enumerate(mixers):
        assert np.array_equal(mixer.sinks, weights[f"blk.{layer}.attn_sinks.weight"])
        assert mixer.scale == pytest.approx(0.3)
        bias = weights[f"blk.{layer}.attn_output.bias"]
        assert mixer.output_bias == pytest.approx(bias * np.float32(0.4))
    del weights["blk.3.attn_sinks.weight"]
    with pytest.raises(ModelFileError, match=r"blk\.3\.attn_sinks"):
        opened(write_toy_arch(tmp_path / "n.gguf", toy, weights=weights))


def test_the_shared_expert_may_be_joined(tmp_path):
    """Its gate are the first rows of one tensor, or a tensor of its own; half of either is refused."""
    weights = toy_arch_weights(TOY)
    name = "blk.2.ffn_up_shexp.weight"
    both = weights[name]
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))
    joined = model.non_expert.layers[2].shared.stack
    apart = weights | {name: both[48:], "blk.2.ffn_gate_shexp.weight": both[:48]}
    model = opened(write_toy_arch(tmp_path / "n.gguf", TOY, weights=apart))
    own = model.non_expert.layers[2].shared.stack
    for one, other in ((joined.gate, own.gate), (joined.up, own.up)):
        assert np.array_equal(one.raw, other.raw)
    assert joined.down.scales == pytest.approx([0.4])
    weights[name] = both[:48]
    with pytest.raises(ModelFileError, match=r"blk\.2\.ffn_gate_shexp\.weight' is missing"):
        opened(write_toy_arch(tmp_path / "o.gguf", TOY, weights=weights))


def test_what_says_nothing_of_text_changes_nothing(tmp_path):
    """Layers to which parts of images are added, and the flag by which Granite's other files do not turn."""
    keys = {
        "granite_swa.deepstack_mapping": [-1, 1, -1, 2, -1],
        "granite_swa.rope.scaling.finetuned": False,
    }
    plain = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    model = opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=keys))
    assert model.spec == replace(plain.spec, name=model.spec.name)
    assert model.non_expert.ropes == (ROPE,) * 5


def test_a_biased_feed_forward_is_refused_beside_a_factor(tmp_path):
    """As in Granite's other architectures."""
    weights = toy_arch_weights(DENSE)
    weights["blk.1.ffn_down.bias"] = np.ones(64, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_down"):
        opened(write_toy_arch(tmp_path / "m.gguf", DENSE, weights=weights))
