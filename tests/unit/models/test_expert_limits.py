"""Limits of what experts multiply: which experts get which, what they change, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.errors import UnsupportedModelError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import ExpertActivation, SiluLimits
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.remote.holdings import held_fingerprint

MAPLE = ToyArch("maple", layers=4, window=16)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def stacks_of(path):
    return [layer.stack for layer in opened(path).expert_layers]


def test_maple_limits_the_gate_before_its_silu(tmp_path):
    """The largest value of the gate is the SiLU of the limit; a limit of nothing leaves a layer SwiGLU, one number is all's."""
    path = write_toy_arch(tmp_path / "m.gguf", MAPLE)
    stacks = stacks_of(path)
    limit = pytest.approx(0.6), pytest.approx(0.6 / (1 + math.exp(-0.6)))
    for layer, stack in enumerate(stacks):
        if layer == 1:
            assert stack.activation is ExpertActivation.SILU
            assert stack.limits is None
        else:
            assert stack.activation is ExpertActivation.LIMITED_SILU
            assert (stack.limits.up, stack.limits.gate) == limit
    write_toy_arch(path, MAPLE, metadata={"maple.swiglu_clamp_exp": 7.0})
    assert [stack.limits.up for stack in stacks_of(path)] == [7.0] * 4
    write_toy_arch(path, MAPLE, metadata={"maple.swiglu_clamp_exp": [0.0, 1e-7, 0.0, 0.0]})
    with open_model_file(path) as file:
        assert open_model(file, ReferenceKernels()).spec.expert_limits == ()


def test_layers_that_differ_in_limits_share_their_slots(tmp_path):
    """Where an expert lies does not depend on its formula's numbers."""
    path = write_toy_arch(tmp_path / "m.gguf", MAPLE)
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
        catalog = ExpertCatalog(model.expert_layers)
        assert len({catalog.layout(layer) for layer in catalog.routed_layers}) == 1


def test_workers_with_other_limits_are_told_apart(tmp_path):
    """The same tensors with another limit, or without any, are other experts."""
    spec = opened(write_toy_arch(tmp_path / "m.gguf", MAPLE)).spec
    held = [np.arange(8, dtype=np.int32)] * 4
    others = [SiluLimits(1.0, 2.0)] * 4, [SiluLimits(2.0, 1.0)] * 4, ()
    specs = [spec, *(replace(spec, expert_limits=tuple(limits)) for limits in others)]
    assert len({held_fingerprint(each, held) for each in specs}) == 4


def test_scales_of_matrices_beside_limits_are_refused(tmp_path):
    """A scale of up is no factor of a limited result."""
    weights = toy_arch_weights(MAPLE)
    weights["blk.2.ffn_up_exps.scale"] = np.full(8, 0.5, np.float32)
    path = write_toy_arch(tmp_path / "m.gguf", MAPLE, weights=weights)
    with pytest.raises(UnsupportedModelError, match=r"blk\.2\.ffn_up_exps"):
        opened(path)
    weights["blk.1.ffn_up_exps.scale"] = weights.pop("blk.2.ffn_up_exps.scale")
    assert opened(write_toy_arch(path, MAPLE, weights=weights)).spec.num_layers == 4
