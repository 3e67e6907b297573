"""What mimo2's files say of values, windows and sinks, and what is left out of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.toy_archs import (
    ToyArch,
    toy_arch_metadata,
    toy_arch_weights,
    toy_layer,
    write_toy_arch,
)
from tests.support.toy_parts import Draw
from thermocline.errors import ModelFileError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.whole_layer import AttentionWeights
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model, open_next_blocks
from thermocline.models.spec import LayerKind

TOY = ToyArch("mimo2", layers=4, kv_heads=1, head_dim=24, rotary=8, window=16)
BLOCKS = 3


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_layers_with_a_window_have_heads_and_sinks_of_their_own(tmp_path):
    """Two of four layers: twice as many heads of keys, a faster turn, sinks. Values are narrower than keys in all."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY))
    spec, mixers = model.spec, [parts.mixer for parts in model.non_expert.layers]
    near = [kind is LayerKind.WINDOW for kind in spec.layer_kinds]
    assert near == [False, True, True, False]
    far_heads, near_heads = (HeadShape(count, 24, own_value_dim=16) for count in (1, 2))
    assert spec.kv_shapes == (far_heads, near_heads, near_heads, far_heads)
    assert near_heads.token_bytes(CacheType.F16) == 2 * (24 + 16) * 2
    for mixer, rope, is_near in zip(mixers, model.non_expert.ropes, near, strict=True):
        assert isinstance(mixer, AttentionWeights)
        assert (mixer.sinks is not None) == is_near
        assert mixer.window == (16 if is_near else 0)
        assert (rope.num_dims, rope.base) == (8, 500.0 if is_near else 10000.0)
        assert mixer.output.cols == 4 * 16
        assert mixer.output.scale == pytest.approx(0.707)
        assert mixer.scale == pytest.approx(24**-0.5)
    assert spec.dense_layers == {0}


def test_windows_may_be_flags_and_values_as_wide_as_keys(tmp_path):
    """As numbers, which the converter writes; and a model with one size of heads keeps its values beside the keys."""
    flags = {"mimo2.attention.sliding_window_pattern": [False, True, True, False]}
    even = ToyArch("mimo2", layers=4, kv_heads=1, rotary=8, window=16)
    spec = opened(write_toy_arch(tmp_path / "m.gguf", even, metadata=flags)).spec
    assert [kind is LayerKind.WINDOW for kind in spec.layer_kinds] == [False, True, True, False]
    assert not any(shape.own_value_dim for shape in spec.kv_shapes)


def test_blocks_behind_the_trunk_are_left_out(tmp_path):
    """Three of them, each with a window: the model is its trunk. Drafting needs all that they have."""
    draw = Draw(3)
    weights, metadata = toy_arch_weights(TOY), toy_arch_metadata(TOY)
    for index in range(TOY.layers, TOY.layers + BLOCKS):
        block = toy_layer(TOY, draw, 1)
        block["nextn.eh_proj.weight"] = draw.matrix(TOY.hidden, 2 * TOY.hidden)
        weights |= {f"blk.{index}.{name}": values for name, values in block.items()}
    kv_heads, pattern = (
        [*metadata[f"mimo2.attention.{key}"], *[own] * BLOCKS]
        for key, own in (("head_count_kv", 2), ("sliding_window_pattern", 1))
    )
    keys = {
        "mimo2.block_count": TOY.layers + BLOCKS,
        "mimo2.nextn_predict_layers": BLOCKS,
        "mimo2.attention.head_count_kv": kv_heads,
        "mimo2.attention.sliding_window_pattern": pattern,
    }
    path = write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights, metadata=keys)
    spec = opened(path).spec
    assert (spec.num_layers, spec.num_predict_layers) == (TOY.layers, BLOCKS)
    assert len(spec.kv_shapes) == TOY.layers
    with open_model_file(path) as file, pytest.raises(ModelFileError, match="enorm"):
        open_next_blocks(file, ReferenceKernels())


def test_a_bias_of_the_output_is_scaled_with_it(tmp_path):
    """The factor is on all that attention gives."""
    weights = toy_arch_weights(TOY)
    bias = np.linspace(-1, 1, TOY.hidden, dtype=np.float32)
    weights["blk.1.attn_output.bias"] = bias
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))
    mixers = [parts.mixer for parts in model.non_expert.layers]
    np.testing.assert_array_equal(mixers[1].output_bias, bias * np.float32(0.707))
    assert mixers[0].output_bias is None


@pytest.mark.parametrize(
    ("name", "rows"), [("attn_v.weight", 24), ("attn_sinks.weight", 2), ("attn_output.weight", 32)]
)
def test_tensors_of_another_size_are_refused(tmp_path, name, rows):
    """Values as wide as keys, a sink per head of keys, and an output of other than the hidden size."""
    weights = toy_arch_weights(TOY)
    own = weights[f"blk.1.{name}"]
    weights[f"blk.1.{name}"] = np.ones((rows, *own.shape[1:]), np.float32)
    with pytest.raises(ModelFileError, match=rf"blk\.1\.{name.removesuffix('.weight')}"):
        opened(write_toy_arch(tmp_path / "m.gguf", TOY, weights=weights))
