"""The packaged demo model: present, small, and exactly the kind of file that the docs describe."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH, DEMO_QUESTIONS
from thermocline.modelfile.reader import ModelFile, open_model_file

NUM_LAYERS, NUM_EXPERTS, HIDDEN, EXPERT_FF = 4, 16, 256, 256
LAYERS_SHA256 = "201e112e36a85cacea6b6264f5176cef8d81823d6bd99dae777b6b15dc5cbf7c"
"""Of the names and bytes of all tensors but the drafting block's."""


@pytest.fixture
def model_file():
    """The demo model, opened."""
    with open_model_file(str(DEMO_MODEL_PATH)) as opened:
        yield opened


def test_file_is_small_enough_to_ship():
    """The model is in the package and takes at most 10 MiB."""
    assert 1 << 20 < DEMO_MODEL_PATH.stat().st_size <= 10 << 20


def test_metadata_describes_a_qwen3moe_chat_model(model_file: ModelFile):
    """Architecture, sizes and routing are those that the demo model says of itself; one block more drafts."""
    facts = model_file.metadata
    assert model_file.architecture == "qwen3moe"
    assert facts.get_str("general.name") == "thermocline demo"
    assert facts.get_str("general.license") == "apache-2.0"
    assert facts.get_int("qwen3moe.block_count") == NUM_LAYERS + 1
    assert facts.get_int("qwen3moe.nextn_predict_layers") == 1
    assert facts.get_int("qwen3moe.embedding_length") == HIDDEN
    assert facts.get_int("qwen3moe.expert_count") == NUM_EXPERTS
    assert facts.get_int("qwen3moe.expert_used_count") == 4
    assert facts.get_int("qwen3moe.expert_feed_forward_length") == EXPERT_FF
    assert facts.get_int("qwen3moe.attention.key_length") == 64
    assert facts.get_int("qwen3moe.context_length") >= 2048


def test_tokenizer_covers_every_byte_and_marks_the_special_tokens(model_file: ModelFile):
    """A byte-level vocabulary of 256 bytes and merges, whose last three tokens are control tokens."""
    facts = model_file.metadata
    tokens = facts.get_strings("tokenizer.ggml.tokens")
    types = facts.get_ints("tokenizer.ggml.token_type")
    assert facts.get_str("tokenizer.ggml.model") == "gpt2"
    assert facts.get_str("tokenizer.ggml.pre") == "qwen2"
    assert len(set(tokens)) == len(tokens) == len(types)
    assert sum(len(token) == 1 for token in tokens) == 256
    assert tokens[-3:] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert [i for i, kind in enumerate(types) if kind == 3] == [
        len(tokens) - 3,
        len(tokens) - 2,
        len(tokens) - 1,
    ]
    assert tokens[facts.get_int("tokenizer.ggml.eos_token_id")] == "<|im_end|>"
    assert tokens[facts.get_int("tokenizer.ggml.padding_token_id")] == "<|endoftext|>"
    assert facts.get_bool("tokenizer.ggml.add_bos_token") is False


def test_every_merge_joins_known_tokens_into_a_known_token(model_file: ModelFile):
    """No merge leads out of the vocabulary."""
    tokens = set(model_file.metadata.get_strings("tokenizer.ggml.tokens"))
    for merge in model_file.metadata.get_strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        assert {left, right, left + right} <= tokens


def test_experts_are_stacked_in_quantised_tensors(model_file: ModelFile):
    """Each layer has three stacked expert tensors; their formats are a mix, as in common files."""
    formats = set()
    for layer in range(NUM_LAYERS):
        for role, rows, row in (
            ("gate", EXPERT_FF, HIDDEN),
            ("up", EXPERT_FF, HIDDEN),
            ("down", HIDDEN, EXPERT_FF),
        ):
            tensor = model_file.tensors[f"blk.{layer}.ffn_{role}_exps.weight"]
            assert tensor.shape == (NUM_EXPERTS, rows, row)
            formats.add((role, tensor.format.name))
    assert formats == {("gate", "Q4_K"), ("up", "Q4_K"), ("down", "Q4_K"), ("down", "Q6_K")}
    everywhere = {tensor.format.name for tensor in model_file.tensors.values()}
    assert everywhere == {"F32", "Q4_K", "Q5_K", "Q6_K", "Q8_0"}


def test_the_layers_are_those_that_were_trained_first(model_file: ModelFile):
    """Adding the block that drafts changed no byte of what answers."""
    layers = hashlib.sha256()
    for name in sorted(model_file.tensors):
        if not name.startswith(f"blk.{NUM_LAYERS}."):
            layers.update(name.encode() + model_file.view(name).tobytes())
    assert layers.hexdigest() == LAYERS_SHA256


def test_held_text_is_prose_that_the_vocabulary_can_write():
    """The held-out text is 6 to 10 kB of plain text without special tokens."""
    text = DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8")
    assert 6_000 <= len(text.encode()) <= 10_000
    assert "<|" not in text


def test_held_text_was_not_trained_on():
    """No sentence of the held-out text is in the training texts."""
    sources = Path(__file__).parents[3] / "scripts" / "demo_model"
    trained = " ".join((sources / name).read_text() for name in ("corpus.txt", "prose.txt"))
    held = DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8")
    sentences = [part.strip() for part in re.split(r"[.?!:;]\s", held)]
    assert len(sentences) > 50
    assert [sentence for sentence in sentences if len(sentence) > 20 and sentence in trained] == []


def test_demo_questions_are_distinct():
    """There are several questions to show, none of them twice."""
    assert len(set(DEMO_QUESTIONS)) == len(DEMO_QUESTIONS) >= 8
