"""Gemma 4's own drafters: llama.cpp's and transformers' guesses, the model's cache left alone, and files that are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.assistant_runs import assistant_guesses, opened_assistant
from tests.support.compare import assert_within
from tests.support.kernel_cases import ISAS
from tests.support.toy_archs import ToyArch, toy_arch_metadata, write_toy_arch
from tests.support.toy_assistant import (
    ARCH,
    CHAINED_TOKENS,
    GOLDEN_ASSISTANTS,
    KNOWN_TOKENS,
    PAIRS,
    assistant_weights,
    write_assistant,
)
from thermocline.errors import ModelError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.gemma4_assistant import AssistantModel, AssistantRows
from thermocline.models.registry import read_spec

PLAIN = PAIRS["experts"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The model and the drafter of each pair."""
    folder = tmp_path_factory.mktemp("pairs")
    return {
        name: (
            write_toy_arch(folder / f"{name} target.gguf", pair.target),
            write_assistant(folder / f"{name} drafter.gguf", pair),
        )
        for name, pair in PAIRS.items()
    }


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("isa", ISAS)
def test_guesses_are_the_oracles(files, name, isa):
    """Behind more than a window: logits of three guesses, and the states that lead from one to the next."""
    golden = np.load(GOLDEN_ASSISTANTS)
    kernels = NativeKernels(isa, threads=1)
    logits, following = assistant_guesses(
        *files[name], KNOWN_TOKENS, CHAINED_TOKENS, kernels=kernels
    )
    for who, limit in (
        ("llama.cpp", "llama.cpp/F32 and GELU"),
        ("transformers", "transformers/F32"),
    ):
        assert_within(logits, golden[f"{name} {who}"], limit)
        assert_within(following, golden[f"{name} {who} next"], limit)


def test_reference_kernels_guess_the_same(files):
    """Part by part, in NumPy."""
    args = (*files["readers"], KNOWN_TOKENS[:9], CHAINED_TOKENS)
    native = assistant_guesses(*args)
    for found, expected in zip(
        assistant_guesses(*args, kernels=ReferenceKernels()), native, strict=True
    ):
        assert_within(found, expected, "reference/float32")


@pytest.mark.parametrize("cache_type", [CacheType.F16, CacheType.Q8_0])
def test_a_smaller_cache_is_read_as_the_model_reads_it(files, cache_type):
    """Guesses move by what the cache rounds, and not by more."""
    exact, _ = assistant_guesses(*files["experts"], KNOWN_TOKENS, CHAINED_TOKENS)
    if cache_type is CacheType.Q8_0:
        name, pair = "q8", replace(PLAIN, target=replace(PLAIN.target, near_head_dim=32))
        folder = files["experts"][0].parent
        target = write_toy_arch(folder / f"{name} target.gguf", pair.target)
        drafter = write_assistant(folder / f"{name} drafter.gguf", pair)
        exact, _ = assistant_guesses(target, drafter, KNOWN_TOKENS, CHAINED_TOKENS)
    else:
        target, drafter = files["experts"]
    found, _ = assistant_guesses(
        target, drafter, KNOWN_TOKENS, CHAINED_TOKENS, cache_type=cache_type
    )
    error = float(((found - exact) ** 2).sum() / (exact**2).sum())
    assert 0 < error < 1e-2


def test_rows_are_what_they_are_alone_and_write_nothing(files):
    """Three sequences at once, in blocks and windows' blocks of their own."""
    pair_files = files["experts"]
    with opened_assistant(*pair_files, num_blocks=12) as (target, drafts, cache):
        sequences = [KNOWN_TOKENS[:5], KNOWN_TOKENS[4:30], KNOWN_TOKENS[10:27]]
        tables = [np.array([4 * n + 2, 4 * n + 1], np.int32) for n in range(3)]
        windows = [np.array([4 * n, 4 * n + 3], np.int32) for n in range(3)]
        before = np.concatenate(
            [
                target.compute(tokens, cache, table, window)[-1:]
                for tokens, table, window in zip(sequences, tables, windows, strict=True)
            ]
        )
        tokens = np.array([3, 200, 17], np.int32)
        positions = np.array([len(each) for each in sequences], np.int32)
        kept = [cache.kv.layer(layer).keys.copy() for layer in cache.kv.layers]
        together = drafts.states(
            tokens, before, AssistantRows(positions, tables, windows), cache.kv
        )
        for layer, keys in zip(cache.kv.layers, kept, strict=True):
            assert np.array_equal(cache.kv.layer(layer).keys, keys)
        for row in range(3):
            at = slice(row, row + 1)
            alone = AssistantRows(positions[at], tables[at], windows[at])
            assert np.array_equal(
                drafts.states(tokens[at], before[at], alone, cache.kv), together[at]
            )


def test_a_larger_vocabulary_is_cut_to_the_models(tmp_path, files):
    """Tokens that the model lacks can not be guessed."""
    tokens = [*toy_arch_metadata(PLAIN.target)["tokenizer.ggml.tokens"], "more", "still more"]
    weights = assistant_weights(PLAIN)
    more = np.full((2, PLAIN.hidden), 9, np.float32)
    weights["token_embd.weight"] = np.concatenate((weights["token_embd.weight"], more))
    path = write_assistant(
        tmp_path / "m.gguf", PLAIN, weights=weights, metadata={"tokenizer.ggml.tokens": tokens}
    )
    target, plain = files["experts"]
    found, expected = (
        assistant_guesses(target, drafter, KNOWN_TOKENS[:5], CHAINED_TOKENS[:1])
        for drafter in (path, plain)
    )
    assert np.array_equal(found[0], expected[0])


def refused(target, path) -> str:
    """Return why a drafter is not opened."""
    with (
        open_model_file(target) as file,
        open_model_file(path) as own,
        pytest.raises(ModelError) as caught,
    ):
        AssistantModel(own, file, read_spec(file), NativeKernels(threads=1))
    assert "Fix: " in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"embedding_length_out": 96}, "takes states of 96 numbers, not 64"),
        ({"embedding_length_out": None}, "embedding_length_out"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers = 1"),
        ({"embedding_length_per_layer_input": 8}, "embedding_length_per_layer_input = 8"),
        ({"attention.sliding_window": 17}, "window has 17 tokens, and the model keeps 16"),
        ({"attention.sliding_window": 1}, "attention.sliding_window is 1"),
        ({"attention.sliding_window_pattern": None}, "attention.sliding_window_pattern"),
        ({"expert_count": 4}, "expert_count"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, files, changes, what):
    """The error names the key, or what differs from the model."""
    metadata = {f"{ARCH}.{key}": value for key, value in changes.items()}
    path = write_assistant(tmp_path / "m.gguf", PLAIN, metadata=metadata)
    assert what in refused(files["experts"][0], path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"head_dim": 16}, "layer 2 attends to 1 key heads of 16 numbers"),
        ({"near_head_dim": 32}, "layer 0 attends to 2 key heads of 32 numbers"),
        ({"kv_heads": 2}, "layer 2 attends to 2 key heads of 32 numbers"),
        ({"hidden": 96}, "states of 96 numbers"),
    ],
)
def test_a_drafter_of_another_model_is_refused(tmp_path, files, changes, what):
    """It was made for other sizes, and the error names the model to look for."""
    other = replace(PLAIN, target=replace(PLAIN.target, **changes))
    path = write_assistant(tmp_path / "m.gguf", other)
    said = refused(files["experts"][0], path)
    assert what in said
    assert "published with experts target.gguf" in said


def test_a_model_of_another_architecture_is_refused(tmp_path, files):
    """Whatever its sizes are."""
    target = write_toy_arch(tmp_path / "m.gguf", ToyArch("qwen2moe", hidden=64))
    assert "drafts for gemma4, not for qwen2moe" in refused(target, files["experts"][1])


def test_another_vocabulary_is_refused(tmp_path, files):
    """The first token that differs is named."""
    tokens = list(toy_arch_metadata(PLAIN.target)["tokenizer.ggml.tokens"])
    tokens[70], tokens[90] = tokens[90], tokens[70]
    path = write_assistant(tmp_path / "m.gguf", PLAIN, metadata={"tokenizer.ggml.tokens": tokens})
    assert "token 70 is" in refused(files["experts"][0], path)


@pytest.mark.parametrize(
    "name",
    [
        *("nextn.pre_projection.weight", "nextn.post_projection.weight", "output_norm.weight"),
        *("blk.1.attn_q.weight", "blk.0.post_ffw_norm.weight", "token_embd.weight"),
        "rope_freqs.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, files, name):
    """Each is needed."""
    weights = assistant_weights(PLAIN)
    del weights[name]
    path = write_assistant(tmp_path / "m.gguf", PLAIN, weights=weights)
    assert name in refused(files["experts"][0], path)


def test_parts_of_other_forms_are_refused(tmp_path, files):
    """A tensor that nobody takes would change the guesses."""
    weights = assistant_weights(PLAIN) | {"fc.weight": np.zeros((4, 4), np.float32)}
    path = write_assistant(tmp_path / "m.gguf", PLAIN, weights=weights)
    assert "fc.weight" in refused(files["experts"][0], path)


def test_routed_experts_are_refused(tmp_path, files):
    """Published ones have none, and the reference of this form allows none."""
    metadata = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    path = write_assistant(
        tmp_path / "m.gguf",
        PLAIN,
        weights=assistant_weights(PLAIN)
        | {"blk.0.ffn_gate_inp.weight": np.zeros((4, PLAIN.hidden), np.float32)},
        metadata={f"{ARCH}.{key}": value for key, value in metadata.items()},
    )
    assert "no routed experts" in refused(files["experts"][0], path)


def test_what_chooses_a_part_of_the_head_is_left_out(tmp_path, files):
    """Guesses are those of the whole head, with such tensors and without."""
    target, plain = files["experts"]
    weights = assistant_weights(PLAIN) | {
        "masked_embd_centroids.weight": np.ones((8, PLAIN.hidden), np.float32),
        "masked_embd_ordering": np.arange(264, dtype=np.float32),
    }
    path = write_assistant(tmp_path / "m.gguf", PLAIN, weights=weights)
    found, expected = (
        assistant_guesses(target, drafter, KNOWN_TOKENS[:5], CHAINED_TOKENS[:1])
        for drafter in (path, plain)
    )
    assert np.array_equal(found[0], expected[0])
