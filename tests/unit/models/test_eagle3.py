"""EAGLE-3 drafters: llama.cpp's guesses, and files that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within, nmse
from tests.support.eagle3_runs import eagle_guesses
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_eagle3 import (
    CHAINED_TOKENS,
    EAGLES,
    GOLDEN_EAGLE3,
    KNOWN_TOKENS,
    eagle_metadata,
    eagle_weights,
    known_features,
    num_tokens,
    tokens_of_rows,
    write_eagle,
)
from thermocline.errors import ModelError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.eagle3 import Eagle3Model
from thermocline.models.registry import read_spec

ROWS, WIDE, SHARED = EAGLES["rows"], EAGLES["wide"], EAGLES["shared"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """The models that the toys draft for."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        name: write_toy_arch(folder / f"{name}.gguf", toy.target) for name, toy in EAGLES.items()
    }


def guesses(targets, path, name, features=None, **options):
    """Return logits and states behind the known tokens."""
    features = known_features(EAGLES[name]) if features is None else features
    return eagle_guesses(targets[name], path, KNOWN_TOKENS, features, CHAINED_TOKENS, **options)


@pytest.mark.parametrize("name", EAGLES)
def test_guesses_are_llama_cpps(tmp_path, targets, name):
    """With a part of the vocabulary, a width of its own, shared ends, norms at other places, and scaled rotation."""
    path, golden = write_eagle(tmp_path / "m.gguf", EAGLES[name]), np.load(GOLDEN_EAGLE3)
    expected = golden[name], golden[f"{name} next"]
    for found, theirs in zip(guesses(targets, path, name), expected, strict=True):
        assert_within(found, theirs, "llama.cpp/F32")
    exact = guesses(targets, path, name, kernels=ReferenceKernels())
    for found, theirs in zip(exact, expected, strict=True):
        assert_within(found, theirs, "llama.cpp/F32")


@pytest.mark.parametrize("isa", ["avx2", "auto"])
def test_a_cache_of_bytes_guesses_nearly_the_same(tmp_path, targets, isa):
    """Keys and values lose what Q8_0 loses, on each instruction set."""
    path, golden = write_eagle(tmp_path / "m.gguf", ROWS), np.load(GOLDEN_EAGLE3)
    kernels = NativeKernels(threads=1, isa=isa)
    logits, _ = guesses(targets, path, "rows", kernels=kernels, cache_type=CacheType.Q8_0)
    assert_within(logits, golden["rows"], "reference/int8 activations")


@pytest.mark.parametrize("position", [0, 9, len(KNOWN_TOKENS) - 1])
def test_all_known_positions_count(tmp_path, targets, position):
    """Also the first one, whose token is not read: its features go with the second token."""
    path = write_eagle(tmp_path / "m.gguf", ROWS)
    features = known_features(ROWS)
    logits, _ = guesses(targets, path, "rows", features)
    features[position] *= -1
    changed, _ = guesses(targets, path, "rows", features)
    assert nmse(changed, logits) > 1e-6


def opened(target, path, check=lambda model: None):
    """Open a drafter, and return what `check` says of it."""
    with open_model_file(target) as file, open_model_file(path) as own:
        return check(Eagle3Model(own, file, read_spec(file), NativeKernels(threads=1)))


def refused(target, path) -> str:
    """Return why a drafter is not opened."""
    with pytest.raises(ModelError) as caught:
        opened(target, path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["rows", "recurrent"])
def test_rows_of_the_head_are_tokens_of_the_model(tmp_path, targets, name):
    """As the file lists them, or in the model's order."""
    path, tokens = write_eagle(tmp_path / "m.gguf", EAGLES[name]), tokens_of_rows(EAGLES[name])
    found = opened(
        targets[name], path, lambda model: [model.token_of(row) for row in range(len(tokens))]
    )
    assert found == tokens.tolist()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"eagle3.target_layers": [1, 2, 3]}, "what layers [1, 2, 3] get, of 3 in all"),
        ({"eagle3.target_layers": [-1, 0, 1]}, "what layers [-1, 0, 1] get"),
        ({"eagle3.target_layers": [1, 2]}, "eagle3.target_layers has 2 entries, not 3"),
        ({"eagle3.target_layers": None}, "eagle3.target_layers"),
        ({"eagle3.target_hidden_size": 96}, "a width of 96, not 64"),
        ({"eagle3.target_hidden_size": None}, "eagle3.target_hidden_size"),
        ({"eagle3.block_count": 2}, "eagle3.block_count"),
        ({"eagle3.norm_before_fc": True}, "enc.output_norm.weight"),
        ({"eagle3.attention.value_length": 16}, "eagle3.attention.value_length"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, targets, changes, what):
    """The error names the key, or what differs from the model."""
    path = write_eagle(tmp_path / "m.gguf", ROWS, metadata=changes)
    assert what in refused(targets["rows"], path)


def test_a_drafter_of_another_model_is_refused(tmp_path, targets):
    """By its tokens, its width, and the tokens that it guesses; what to choose is said."""
    tokens = list(eagle_metadata(ROWS)["tokenizer.ggml.tokens"])
    tokens[5], tokens[70] = tokens[70], tokens[5]
    changed = {"tokenizer.ggml.tokens": tokens}
    path = write_eagle(tmp_path / "tokens.gguf", ROWS, metadata=changed)
    assert "2 of 264 tokens differ" in refused(targets["rows"], path)
    other = replace(ROWS, target=ToyArch("llama", hidden=96))
    path = write_eagle(tmp_path / "width.gguf", other)
    why = refused(targets["rows"], path)
    assert "it reads layers of a width of 96, not 64" in why
    assert "trained for rows.gguf" in why
    for wrong in (num_tokens(ROWS), -1):
        weights = eagle_weights(ROWS)
        weights["d2t"] = np.concatenate((weights["d2t"][:-1], [wrong]))
        path = write_eagle(tmp_path / "guessed.gguf", ROWS, weights=weights)
        assert f"it guesses token {wrong}, of 264" in refused(targets["rows"], path)


@pytest.mark.parametrize(
    ("lacks", "what"), [("own_embedding", "no embedding"), ("own_head", "no head")]
)
def test_a_width_of_its_own_needs_ends_of_its_own(tmp_path, targets, lacks, what):
    """The model's matrices do not fit."""
    path = write_eagle(tmp_path / "m.gguf", replace(WIDE, **{lacks: False}))
    assert f"it has {what} of its own, and a width of 48, not 64" in refused(targets["wide"], path)


def test_rows_of_no_head_are_refused(tmp_path, targets):
    """The model's head has a row for each token."""
    path = write_eagle(tmp_path / "m.gguf", replace(SHARED, rows=90))
    assert "'output.weight' is missing" in refused(targets["shared"], path)


@pytest.mark.parametrize(
    "name", ["fc.weight", "blk.0.attn_norm_2.weight", "blk.0.attn_v.weight", "output_norm.weight"]
)
def test_a_missing_tensor_is_named(tmp_path, targets, name):
    """Each is needed."""
    weights = eagle_weights(ROWS)
    del weights[name]
    path = write_eagle(tmp_path / "m.gguf", ROWS, weights=weights)
    assert name in refused(targets["rows"], path)


def test_other_tensors_are_refused(tmp_path, targets):
    """Biases would change the guesses; a list of tokens is a list of 64-bit integers."""
    path = tmp_path / "m.gguf"
    write_eagle(
        path, ROWS, weights=eagle_weights(ROWS) | {"blk.0.attn_q.bias": np.zeros(128, "f4")}
    )
    assert "blk.0.attn_q.bias" in refused(targets["rows"], path)
    write_eagle(path, ROWS, weights=eagle_weights(ROWS) | {"t2d": np.arange(4)})
    assert "t2d" in refused(targets["rows"], path)
    write_eagle(path, ROWS, weights=eagle_weights(ROWS) | {"d2t": np.ones(90, "f4")})
    assert "'d2t' is F32 of shape [90]" in refused(targets["rows"], path)


def test_a_vocabulary_may_have_more_tokens_at_its_end(tmp_path, targets):
    """Of the drafter's further tokens none is guessed; of the model's, the drafter has no embedding."""
    tokens = list(eagle_metadata(WIDE)["tokenizer.ggml.tokens"])
    more = {"tokenizer.ggml.tokens": [*tokens, "x1", "x2"]}
    weights = eagle_weights(replace(WIDE, rows=0))
    weights["output.weight"] = np.concatenate((weights["output.weight"],) * 2)[: len(tokens) + 2]
    path = write_eagle(tmp_path / "more.gguf", WIDE, weights=weights, metadata=more)
    logits, _ = guesses(targets, path, "wide")
    assert logits.shape[1] == len(tokens)
    weights = eagle_weights(WIDE)
    weights["token_embd.weight"] = weights["token_embd.weight"][: CHAINED_TOKENS[-1]]
    path = write_eagle(tmp_path / "fewer.gguf", WIDE, weights=weights)
    logits, _ = guesses(targets, path, "wide")
    golden = np.load(GOLDEN_EAGLE3)["wide"]
    assert_within(logits[:2], golden[:2], "llama.cpp/F32")
    assert nmse(logits[2], golden[2]) > 1e-6
