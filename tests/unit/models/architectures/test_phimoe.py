"""Phi-3.5-MoE: what its files state, which list of rotary factors is taken, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.norms_cases import PHIMOE_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline import ConfigError, EngineConfig, MemoryConfig
from thermocline.engine.api import Engine
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.dense_contract import Gating, RoutingRule
from thermocline.kernels.dense_reference import ReferenceDense
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.rope import LongRope
from thermocline.models.spec import LayerKind

DEFAULT, WINDOW = (ToyArch("phimoe", **PHIMOE_OPTIONS[name]) for name in ("default", "window"))
PLAIN = ToyArch("phimoe")
PUBLISHED = ToyArch("phimoe", stretched=True, context=131072)


def test_what_a_file_states(tmp_path):
    """Norms with biases, two experts that are weighed among those near them, and no window but a short one."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    assert spec.norms_center
    assert spec.norms_have_bias
    assert (spec.router.gating, spec.router.normalize_top_k) == (Gating.NEAR_BEST, False)
    assert spec.rope_scaling == LongRope(64, float(np.float32(1.19)))
    assert spec.window is None
    assert not spec.cpu_only
    near = spec_of(write_changed(tmp_path, WINDOW))
    assert near.layer_kinds == (LayerKind.WINDOW,) * 4
    assert near.window.num_tokens == 9
    assert (
        spec_of(write_changed(tmp_path, WINDOW, **{"attention.sliding_window": 512})).window is None
    )


def test_its_parts(tmp_path):
    """All norms and the head have the file's biases, as q, k, v and attention's output have."""
    weights = toy_arch_weights(DEFAULT)
    with open_model_file(str(write_changed(tmp_path, DEFAULT))) as file:
        model = open_model(file, ReferenceKernels())
        parts, end = model.non_expert.layers[1], model.non_expert
        for centering, name in (
            (parts.mixer.centering, "blk.1.attn_norm"),
            (parts.centering, "blk.1.ffn_norm"),
            (end.centering, "output_norm"),
        ):
            np.testing.assert_array_equal(centering.bias, weights[f"{name}.bias"])
        np.testing.assert_array_equal(end.output_bias, weights["output.bias"])
        np.testing.assert_array_equal(parts.mixer.biases[2], weights["blk.1.attn_v.bias"])
        np.testing.assert_array_equal(parts.mixer.output_bias, weights["blk.1.attn_output.bias"])
        router = model.router_weights(LayerIndex(1))
        assert router.centering is parts.centering


@pytest.mark.parametrize(
    ("context", "which"), [(None, "long"), (65, "long"), (64, "short"), (8, "short")]
)
def test_the_context_chooses_the_list(tmp_path, context, which):
    """Longer than the original one: long factors for every sequence. A cached key never turns again."""
    weights = toy_arch_weights(DEFAULT)
    with open_model_file(str(write_changed(tmp_path, DEFAULT))) as file:
        model = open_model(file, ReferenceKernels(), context)
        assert model.spec.turns_far == (which == "long")
        for rope in model.non_expert.ropes:
            assert rope.factors == tuple(weights[f"rope_factors_{which}.weight"].tolist())
            assert rope.magnitude == float(np.float32(1.19))


async def test_engines_say_which(tmp_path):
    """The one that --ctx asks for, as a choice with its reason."""
    path = write_toy_arch(tmp_path / "m.gguf", DEFAULT)
    for context, which in ((None, "long"), (64, "short")):
        config = EngineConfig(memory=MemoryConfig(max_context_tokens=context))
        async with Engine.open(path, config) as engine:
            found = {choice.name: choice for choice in engine.choices()}["rotary factors"]
            assert found.value == f"those of {which} contexts"
            assert "64 tokens" in found.why
    with pytest.raises(ConfigError, match="--ctx is 513"):
        async with Engine.open(path, EngineConfig(memory=MemoryConfig(max_context_tokens=513))):
            pass


@pytest.mark.parametrize(
    ("keys", "magnitude"),
    [
        ({"rope.scaling.attn_factor": 1.190238}, 1.243163121016122),
        ({"rope.scaling.attn_factor": 1.2}, 1.2),
        ({"rope.scaling.attn_factor": 1.190238, "context_length": 65536}, 1.190238),
    ],
)
def test_the_published_magnitude(tmp_path, keys, magnitude):
    """The converter writes what follows from the lengths, whatever the configuration says; another value is the file's."""
    keys = {"rope.scaling.original_context_length": 4096} | keys
    spec = spec_of(write_changed(tmp_path, PUBLISHED, **keys))
    assert spec.rope_scaling.magnitude == pytest.approx(magnitude, rel=1e-7)


def test_a_magnitude_without_lists_is_refused(tmp_path):
    """Of what it would be, nothing is known."""
    with pytest.raises(UnsupportedModelError, match="attn_factor"):
        spec_of(write_changed(tmp_path, PLAIN, **{"rope.scaling.attn_factor": 1.2}))


@pytest.mark.parametrize(
    "tensor",
    [
        *("rope_factors_long.weight", "rope_factors_short.weight"),
        *("output_norm.bias", "blk.1.attn_norm.bias", "blk.0.ffn_norm.bias"),
    ],
)
def test_missing_tensors_are_named(tmp_path, tensor):
    """One list without the other, and a norm without its bias."""
    path = write_without(tmp_path, DEFAULT, tensor)
    with open_model_file(str(path)) as file, pytest.raises(ModelFileError, match=tensor):
        open_model(file, ReferenceKernels())


def test_a_factor_of_zero_is_refused(tmp_path):
    """As other factors of the rotary embedding."""
    weights = toy_arch_weights(DEFAULT)
    weights["rope_factors_short.weight"][1] = 0
    path = write_changed(tmp_path, DEFAULT, weights)
    with open_model_file(str(path)) as file, pytest.raises(ModelFileError, match="not positive"):
        open_model(file, ReferenceKernels())


def test_toys_have_logits_near_each_other():
    """A tenth of all tokens and more share a weight, or what is compared by them would be a softmax of one."""
    rng = np.random.default_rng(3)
    router = toy_arch_weights(DEFAULT)["blk.0.ffn_gate_inp.weight"]
    logits = rng.standard_normal((500, DEFAULT.hidden)).astype(np.float32) @ router.T
    _, weights = ReferenceDense().route(logits, RoutingRule(2, False, 1e-5, 1.0, Gating.NEAR_BEST))
    shared = (weights < 0.9).any(axis=1).mean()
    assert 0.1 < shared < 0.9
