"""Synthetic files are what they claim: real shapes, llama.cpp's mix, usable weights, equal bytes."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from benchmarks.synthetic_blocks import DRAWABLE, UNIT, WeightSource
from benchmarks.synthetic_model import SHAPES, has_more_bits, tensors_of, write_model
from thermocline.modelfile.formats import FORMATS_BY_NAME
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec

BIG = SHAPES["qwen3-30b-a3b"]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_equal_seeds_give_equal_files(tmp_path):
    """The bytes depend on the seed and on nothing else."""
    first = digest(write_model(tmp_path / "a.gguf", "tiny"))
    assert digest(write_model(tmp_path / "b.gguf", "tiny")) == first
    assert digest(write_model(tmp_path / "c.gguf", "tiny", seed=8)) != first
    assert not list(tmp_path.glob("*.partial"))


def test_the_file_holds_the_shape(tmp_path):
    """The engine's own reader finds the dimensions, the types and every tensor at its place."""
    with open_model_file(write_model(tmp_path / "a.gguf", "tiny", layers=3)) as file:
        spec = read_spec(file)
        assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (3, 256, 512)
        assert (spec.router.num_experts, spec.router.num_experts_used) == (8, 2)
        expected = {t.name: (t.format, t.shape) for t in tensors_of(SHAPES["tiny"], 3, "Q4_K_M")}
        found = {t.name: (t.format.name, t.shape) for t in file.tensors.values()}
        assert found == expected
        router = file.view("blk.2.ffn_gate_inp.weight").view(np.float32)
        assert 0.8 < router.std() * 16 < 1.2
        assert (file.view("output_norm.weight").view(np.float32) == 1).all()


def test_skew_scales_the_router_alone(tmp_path):
    """Uneven routing changes the gain of experts in the router, and no other byte of the weights."""
    even = write_model(tmp_path / "even.gguf", "tiny")
    skewed = write_model(tmp_path / "skewed.gguf", "tiny", skew=1.0)
    with open_model_file(even) as a, open_model_file(skewed) as b:
        differ = {name for name in a.tensors if not np.array_equal(a.view(name), b.view(name))}
        gains = b.view("blk.0.ffn_gate_inp.weight").view(np.float32).std(axis=1)
    assert differ == {"blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weight"}
    assert gains.max() > 2 * gains.min()


def test_half_of_the_layers_get_more_bits():
    """llama.cpp's rule: both ends and every third layer between; 24 of 48, 4 of 8."""
    assert [layer for layer in range(8) if has_more_bits(layer, 8)] == [0, 3, 6, 7]
    assert sum(has_more_bits(layer, 48) for layer in range(48)) == 24


def test_the_real_shape_has_the_real_size():
    """Without writing it: 48 layers of Qwen3-30B-A3B in Q4_K_M are 18.55 GB, as published files."""
    tensors = list(tensors_of(BIG, 48, "Q4_K_M"))
    assert 18.5e9 < sum(tensor.nbytes for tensor in tensors) < 18.6e9
    assert Counter(tensor.format for tensor in tensors)["Q6_K"] == 2 * 24 + 1
    eight = sum(tensor.nbytes for tensor in tensors_of(BIG, 8, "Q4_K_M"))
    assert eight == 3_450_361_856


@pytest.mark.parametrize("format_name", DRAWABLE)
def test_drawn_weights_are_finite_and_scaled(format_name):
    """In every type: finite, of the wanted spread, of nearly no mean, and no two rows alike."""
    raw = WeightSource(1).matrix("w", format_name, 64, 4 * UNIT, deviation=0.05)
    assert raw.shape == (64, FORMATS_BY_NAME[format_name].row_bytes(4 * UNIT))
    values = dequantize(raw, GGMLQuantizationType[format_name])
    assert np.isfinite(values).all()
    assert 0.9 < values.std() / 0.05 < 1.1
    assert abs(values.mean()) < 0.1 * 0.05
    assert len(np.unique(raw, axis=0)) == 64


def test_a_length_that_no_block_divides_is_refused():
    """A tensor that is no whole number of units is an error, not a short file."""
    with pytest.raises(ValueError, match="multiple of 256"):
        next(WeightSource(1).chunks("w", FORMATS_BY_NAME["F32"], 100, 1.0))
