"""What step35 reads: heads, gates and turns by kind of layer, limits of each, and blocks that are left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_archs import ToyArch, toy_arch_metadata, toy_arch_weights, write_toy_arch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.dense_contract import Activation, Gating
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import ExpertActivation, SiluLimits
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import can_draft, open_model, read_spec
from thermocline.models.rope import LinearScaling, RopeRule
from thermocline.models.spec import LayerKind

TOY = ToyArch("step35", layers=5, window=16)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_layers_with_a_window_have_more_heads_and_turn_whole(tmp_path):
    """Layers that see all tokens turn half of each head, with the file's scaling and factors, which windows have not."""
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    toy = replace(TOY, slowed=True, extra=scaled)
    weights = toy_arch_weights(toy)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy, weights=weights))
    spec = model.spec
    kinds = [LayerKind.ATTENTION, *[LayerKind.WINDOW] * 3, LayerKind.ATTENTION]
    assert list(spec.layer_kinds) == kinds
    assert spec.layer_heads == (4, 6, 6, 6, 4)
    assert spec.router.gating is Gating.SIGMOID
    factors = weights["rope_freqs.weight"][:4].tolist()
    far = RopeRule(8, 10000.0, LinearScaling(4.0), factors=tuple(factors))
    near = RopeRule(16, 500.0)
    for layer, (parts, rope) in enumerate(
        zip(model.non_expert.layers, model.non_expert.ropes, strict=True)
    ):
        is_near = kinds[layer] is LayerKind.WINDOW
        assert rope == (near if is_near else far)
        assert parts.mixer.window == (16 if is_near else 0)
        assert parts.mixer.q.rows == 16 * (6 if is_near else 4)
        assert parts.mixer.gate.activation is Activation.SIGMOID
        assert parts.mixer.gate.weight.rows == (6 if is_near else 4)


def test_each_kind_of_layer_may_have_its_own_keys(tmp_path):
    """Heads of keys differ by kind; gates and norms of heads may be missing."""
    weights = toy_arch_weights(TOY)
    for layer in (1, 2, 3):
        for part in ("k", "v"):
            weights[f"blk.{layer}.attn_{part}.weight"] = np.ones((48, 64), np.float32)
    for part in ("gate", "q_norm", "k_norm"):
        del weights[f"blk.2.attn_{part}.weight"]
    keys = {"step35.attention.head_count_kv": [2, 3, 3, 3, 2]}
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights, metadata=keys))
    assert model.spec.kv_shapes[:2] == (HeadShape(2, 16), HeadShape(3, 16))
    assert [parts.mixer.gate is None for parts in model.non_expert.layers] == [
        *[False, False, True, False, False]
    ]
    weights["blk.1.attn_gate.weight"] = np.ones((4, 64), np.float32)
    path = write_toy_arch(tmp_path / "n.gguf", TOY, weights=weights, metadata=keys)
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_gate"):
        opened(path)


def test_limits_are_of_what_silu_gives(tmp_path):
    """The shared expert and the dense layer keep limits of their own, and a layer may have one kind alone."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    routed = [None if of is None else of.stack.limits for of in model.expert_layers]
    shared = [parts.shared.stack.limits for parts in model.non_expert.layers]
    limit, other = (SiluLimits(*[pytest.approx(each)] * 2) for each in (0.4, 0.6))
    assert routed == [None, None, limit, limit, limit]
    assert shared == [other, other, None, other, other]
    assert model.non_expert.layers[2].shared.stack.activation is ExpertActivation.SILU
    assert model.non_expert.layers[0].routed is None


def test_blocks_that_guess_are_left_out(tmp_path):
    """Three of them stand behind the last layer; their places in lists are theirs, and the model is its trunk."""
    own = toy_arch_metadata(TOY)
    lists = {key: [*value, *value[1:4]] for key, value in own.items() if isinstance(value, list)}
    keys = {key: value for key, value in lists.items() if key.startswith("step35.")}
    keys |= {"step35.block_count": 8, "step35.nextn_predict_layers": 3}
    weights = toy_arch_weights(TOY)
    for block in (5, 6, 7):
        weights[f"blk.{block}.attn_norm.weight"] = np.ones(64, np.float32)
        weights[f"blk.{block}.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    path = write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights, metadata=keys)
    with open_model_file(path) as file:
        spec = read_spec(file)
        assert (spec.num_layers, spec.num_predict_layers) == (5, 3)
        assert len(spec.kv_shapes) == len(spec.layer_heads) == 5
        assert len(spec.expert_limits) == 8
        assert can_draft(file, spec)
        assert [shape.kv_heads for shape in spec.next_block_shapes] == [2, 2, 2]
        assert len(open_model(file, ReferenceKernels()).expert_layers) == 5
    del weights["blk.0.attn_norm.weight"]
    with pytest.raises(UnsupportedModelError, match="nothing but blocks"):
        opened(write_toy_arch(tmp_path / "n.gguf", TOY, weights=weights, metadata=keys))
