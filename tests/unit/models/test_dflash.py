"""Block diffusion drafters: llama.cpp's and the authors' logits, and files that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.dflash_runs import block_logits
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_dflash import (
    AUTHORS_BLOCKS,
    GOLDEN_AUTHORS,
    GOLDEN_DFLASH,
    TARGET,
    TOYS,
    known_features,
    masked_block,
    toy_drafter_weights,
    write_older_drafter,
    write_toy_drafter,
)
from thermocline.errors import ModelError
from thermocline.kernels.cpu import NativeKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.dflash import DFlashModel, read_dflash_spec
from thermocline.models.registry import read_spec

PLAIN = TOYS["plain"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The model that the toys draft for."""
    return write_toy_arch(tmp_path_factory.mktemp("target") / "target.gguf", TARGET)


@pytest.mark.parametrize("name", TOYS)
def test_logits_are_llama_cpps(tmp_path, target, name):
    """With windows, partial rotation, and ends of its own."""
    toy = TOYS[name]
    path = write_toy_drafter(tmp_path / "m.gguf", toy)
    found = block_logits(target, path, known_features(toy), masked_block(toy))
    assert_within(found, np.load(GOLDEN_DFLASH)[name], "llama.cpp/F32")


def test_the_older_layout_is_the_authors(tmp_path, target):
    """Their code computed two blocks, the second with eight more known tokens."""
    path, golden = write_older_drafter(tmp_path / "m.gguf", PLAIN), np.load(GOLDEN_AUTHORS)
    for (known, last), expected in zip(AUTHORS_BLOCKS, golden["older logits"], strict=True):
        features = known_features(PLAIN)[:known]
        found = block_logits(target, path, features, masked_block(PLAIN, last))
        assert_within(found, expected, "transformers/F32")


def test_both_layouts_say_the_same(tmp_path, target):
    """One names the layers whose inputs are read, the other those whose outputs are."""
    paths = (
        write_toy_drafter(tmp_path / "new.gguf", PLAIN),
        write_older_drafter(tmp_path / "old.gguf", PLAIN),
    )
    specs = []
    with open_model_file(target) as file:
        for path in paths:
            with open_model_file(path) as own:
                specs.append(read_dflash_spec(own, file, read_spec(file)))
    new, old = specs
    assert new.target_layers == old.target_layers == PLAIN.layers_read
    assert (new.block_tokens, new.mask_token) == (old.block_tokens, old.mask_token)


def test_layers_that_the_older_layout_does_not_name(tmp_path, target):
    """As the authors spread them: behind the second layer to behind the third from the end."""
    key = "qwen35-dflash-draft.dflash.target_layer_ids"
    path = write_older_drafter(tmp_path / "m.gguf", PLAIN, metadata={key: None})
    with open_model_file(target) as file, open_model_file(path) as own:
        assert read_dflash_spec(own, file, read_spec(file)).target_layers == (2, 3, 3)


def test_more_layers_than_there_are_is_refused(tmp_path, target):
    """Where the older layout only counts them."""
    prefix = "qwen35-dflash-draft.dflash."
    changed = {f"{prefix}target_layer_ids": None, f"{prefix}n_target_layers": 1 << 20}
    path = write_older_drafter(tmp_path / "m.gguf", PLAIN, metadata=changed)
    assert "dflash.n_target_layers is 1048576, of 5 in all" in refused(target, path)


def refused(target, path) -> str:
    """Return why a drafter is not opened."""
    with (
        open_model_file(target) as file,
        open_model_file(path) as own,
        pytest.raises(ModelError) as caught,
    ):
        DFlashModel(own, file, read_spec(file), NativeKernels(threads=1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dflash.target_layers": [1, 3, 9]}, "layers [1, 3, 9], of 5"),
        ({"dflash.target_layers": [-1, 3, 4]}, "layers [-1, 3, 4]"),
        ({"dflash.target_layers": None}, "dflash.target_layers"),
        ({"dflash.block_size": 1}, "dflash.block_size"),
        ({"dflash.block_size": 4000}, "dflash.block_size"),
        ({"dflash.attention.causal": True}, "dflash.attention.causal"),
        ({"dflash.selector_rank": 8}, "dflash.selector_rank"),
        ({"tokenizer.ggml.mask_token_id": 100000}, "mask token is 100000"),
        ({"tokenizer.ggml.mask_token_id": None}, "mask_token_id"),
        ({"dflash.attention.sliding_window": 5}, "dflash.attention.sliding_window_pattern"),
        ({"dflash.rope.freq_base": None}, "dflash.rope.freq_base"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, target, changes, what):
    """The error names the key, or what differs from the model."""
    path = write_toy_drafter(tmp_path / "m.gguf", PLAIN, metadata=changes)
    assert what in refused(target, path)


def test_a_drafter_of_another_width_is_refused(tmp_path, target):
    """It was made for another model, and the error says which widths those are."""
    other = write_toy_drafter(tmp_path / "m.gguf", PLAIN, replace(TARGET, hidden=96))
    assert "its width is 96, not 64" in refused(target, other)


@pytest.mark.parametrize("name", ["fc.weight", "blk.1.attn_v.weight", "enc.output_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, target, name):
    """Each is needed."""
    weights = toy_drafter_weights(PLAIN)
    del weights[name]
    path = write_toy_drafter(tmp_path / "m.gguf", PLAIN, weights=weights)
    assert name in refused(target, path)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("markov_w1.weight", 4), ("blk.0.attn_q.bias", 128), ("selector_hidden.weight", 4)],
)
def test_parts_of_other_forms_are_refused(tmp_path, target, name, rows):
    """Heads that are not computed, and biases, would change the guesses."""
    weights = toy_drafter_weights(PLAIN) | {name: np.zeros((rows,), np.float32)}
    path = write_toy_drafter(tmp_path / "m.gguf", PLAIN, weights=weights)
    assert "not supported" in refused(target, path) or name in refused(target, path)
