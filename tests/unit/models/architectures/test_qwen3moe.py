"""Opening a qwen3moe file: what is read, and what is refused with the name of the fault."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.gguf_files import write_gguf
from tests.support.toy_model import ToyShape, toy_metadata, toy_weights, write_toy_model
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model, read_spec


def open_toy(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def test_the_spec_is_what_the_metadata_say(tmp_path):
    """Sizes that could be confused (head_dim times heads is not hidden) come out right."""
    shape = ToyShape(hidden=96, heads=4, head_dim=32, kv_heads=1, experts=6, used=3)
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", shape)) as file:
        spec = read_spec(file)
    assert (spec.hidden_size, spec.num_heads, spec.head_dim, spec.num_kv_heads) == (96, 4, 32, 1)
    assert (spec.router.num_experts, spec.router.num_experts_used) == (6, 3)
    assert spec.router.normalize_top_k
    assert spec.attention_scale == pytest.approx(32**-0.5)


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "expert_count",
        "expert_used_count",
        "context_length",
    ],
)
def test_missing_metadata_is_named(tmp_path, key):
    """No silent default stands in for a number that shapes the result."""
    shape = ToyShape()
    metadata = toy_metadata(shape)
    del metadata[f"qwen3moe.{key}"]
    tensors = [(name, "F32", values) for name, values in toy_weights(shape).items()]
    path = write_gguf(tmp_path / "toy.gguf", metadata, tensors, arch="qwen3moe")
    with pytest.raises(ModelFileError, match=f"qwen3moe.{key}"):
        open_toy(path)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("attention.head_count", 0, "head_count is 0"),
        ("attention.head_count_kv", 3, "no multiple"),
        ("expert_used_count", 9, "exceeds expert_count"),
        ("expert_count", 65537, "more than the 65536"),
        ("attention.layer_norm_rms_epsilon", -1.0, "positive"),
        ("rope.freq_base", float("inf"), "rope.freq_base"),
        ("block_count", 1 << 30, "block_count"),
    ],
)
def test_impossible_numbers_are_refused(tmp_path, key, value, found):
    """Each is a ModelFileError that names the key."""
    path = write_toy_model(tmp_path / "toy.gguf", metadata={f"qwen3moe.{key}": value})
    with pytest.raises(ModelFileError, match=found):
        open_toy(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("attention.value_length", 16),
        ("rope.dimension_count", 8),
        ("expert_weights_scale", 2.5),
    ],
)
def test_what_would_be_silently_wrong_is_refused(tmp_path, key, value):
    """Unknown rotary scaling, odd head shapes and a routing scale would give other tokens if ignored."""
    path = write_toy_model(tmp_path / "toy.gguf", metadata={f"qwen3moe.{key}": value})
    with pytest.raises(UnsupportedModelError, match=key):
        open_toy(path)


def test_a_missing_tensor_is_named(tmp_path):
    """The name of the tensor is in the error."""
    weights = toy_weights(ToyShape())
    del weights["blk.1.ffn_up_exps.weight"]
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up_exps\.weight"):
        open_toy(write_toy_model(tmp_path / "toy.gguf", weights=weights))


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path):
    """Shape found and shape wanted are both in the error."""
    weights = toy_weights(ToyShape())
    weights["blk.0.attn_k.weight"] = weights["blk.0.attn_k.weight"][:-2]
    with pytest.raises(ModelFileError, match=r"\[62, 64\].*\[64, 64\]"):
        open_toy(write_toy_model(tmp_path / "toy.gguf", weights=weights))


def test_a_tensor_without_a_place_is_refused(tmp_path):
    """A bias that this architecture does not have would change every token if it were ignored."""
    weights = toy_weights(ToyShape()) | {"blk.0.attn_norm.bias": np.zeros(64, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_norm\.bias"):
        open_toy(write_toy_model(tmp_path / "toy.gguf", weights=weights))


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    """The error says what the file is and what would work."""
    path = write_gguf(
        tmp_path / "m.gguf", {}, [("a.weight", "F32", np.zeros((1, 32), np.float32))], arch="mamba"
    )
    with pytest.raises(UnsupportedModelError, match=r"mamba.*qwen3moe"):
        open_toy(path)


def test_weights_are_views_of_the_file(tmp_path):
    """No expert matrix owns memory: its bytes are the mapped file's."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(formats={"gate_up": "Q8_0"}))
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
        mapping = file.mapping(0)
        low = mapping.ctypes.data
        for layer in model.expert_layers:
            for index in range(len(layer.stack)):
                expert = layer.stack[index]
                for weight in (expert.gate, expert.up, expert.down):
                    assert low <= weight.raw.ctypes.data < low + mapping.nbytes
                    assert not weight.raw.flags.owndata
                    assert not weight.raw.flags.writeable
