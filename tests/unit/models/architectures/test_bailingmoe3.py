"""What bailingmoe3's files say of decays, gates and limits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from tests.support.toy_next_block import DRAFTING_TOYS, write_drafting_toy
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import SiluLimits
from thermocline.kernels.whole_layer import DeltaWeights, LatentWeights
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model, open_next_blocks

TOY = ToyArch("bailingmoe3", layers=4, head_dim=24, rotary=8)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_decays_are_bounded_and_latent_heads_are_gated(tmp_path):
    """Three layers keep states, whose decays grow with a positive speed; the fourth has a gate per head, and turns."""
    weights = toy_arch_weights(TOY)
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))
    *recurrent, last = (parts.mixer for parts in model.non_expert.layers)
    for layer, mixer in enumerate(recurrent):
        assert isinstance(mixer, DeltaWeights)
        assert mixer.rule.shape.lower_bound == -5.0
        assert mixer.rule.shape.by_channel
        assert mixer.rule.sigmoid_gate
        assert mixer.z_low is None
        assert mixer.alpha_low is None
        speed = weights[f"blk.{layer}.ssm_a"].reshape(-1)
        assert (speed > 0).all()
        assert np.array_equal(mixer.rule.decay, speed)
    assert isinstance(last, LatentWeights)
    assert (last.gate.rows, last.gate.cols) == (4, 64)
    assert model.non_expert.ropes[3].pairs


def test_limits_of_zero_are_none(tmp_path):
    """Converters write them for layers without one; a number for all layers counts as well."""
    zeros = {"bailingmoe3.swiglu_clamp_exp": [0.0] * 4, "bailingmoe3.swiglu_clamp_shexp": 0.0}
    spec = opened(write_toy_arch(tmp_path / "m.gguf", TOY, metadata=zeros)).spec
    assert spec.expert_limits == spec.shared_limits == ()


@pytest.mark.parametrize("limit", [[10.0, 0.0, 0.0, 10.0], 10.0], ids=["by layer", "of all"])
def test_limits_are_of_recurrent_dense_and_attending_layers(tmp_path, limit):
    """Shared experts and the dense layer keep the one of what SiLU gives, and routed experts have their own."""
    keys = {"bailingmoe3.swiglu_clamp_shexp": limit, "bailingmoe3.swiglu_clamp_exp": [0, 7, 0, 0]}
    model = opened(write_toy_arch(tmp_path / "n.gguf", TOY, metadata=keys))
    stacks = [parts.shared.stack for parts in model.non_expert.layers]
    by_layer = limit if isinstance(limit, list) else [limit] * 4
    assert [stack.limits for stack in stacks] == [SiluLimits(n, n) if n else None for n in by_layer]
    routed = [None if of is None else of.stack.limits for of in model.expert_layers]
    assert routed == [None, SiluLimits(7.0, 7.0), None, None]


def test_pictures_and_decays_without_a_bound_are_refused(tmp_path):
    """The text part of models that see turns by other axes; a bound above zero bounds nothing."""
    for key, value, error in (
        ("rope.dimension_sections", [2, 1, 1, 0], UnsupportedModelError),
        ("kda.gate_lower_bound", 3.0, ModelFileError),
        ("kda.gate_lower_bound", None, ModelFileError),
    ):
        path = write_toy_arch(tmp_path / "m.gguf", TOY, metadata={f"bailingmoe3.{key}": value})
        with pytest.raises(error, match=key):
            opened(path)


def test_a_gate_of_another_size_is_refused(tmp_path):
    """One number per head, not per number of a head."""
    weights = toy_arch_weights(TOY)
    weights["blk.3.attn_gate.weight"] = np.ones((64, 64), np.float32)
    with pytest.raises(ModelFileError, match=r"blk\.3\.attn_gate"):
        opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))


def test_the_block_has_its_norm_under_another_name(tmp_path):
    """The layer's output norm stands before the head that the model has."""
    path = write_drafting_toy(tmp_path / "m.gguf", DRAFTING_TOYS["bailingmoe3"])
    with open_model_file(path) as file:
        (block,) = open_next_blocks(file, ReferenceKernels())
        name = "blk.4.layer_output_norm.weight"
        expected = np.frombuffer(file.view(name), np.float32)
        assert np.array_equal(block._norm, expected)
