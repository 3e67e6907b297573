"""Token ids against llama.cpp: every pre-tokenizer name of the table, on random strings."""

from __future__ import annotations

import random

import pytest

from tests.unit.text.vocabularies import (
    UNKNOWN,
    TrainedVocabulary,
    hostile_text,
    natural_text,
    train,
)
from thermocline.text.pretokenizers import PRE_TOKENIZERS
from thermocline.text.tokenizer import Tokenizer

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from tests.oracle.llama_vocabulary import LlamaVocabulary, write_vocabulary

pytestmark = pytest.mark.oracle

NUM_STRINGS = {"qwen2": 20_000}
NUM_STRINGS_ELSE = 5_000


def _strings(count: int, seed: int):
    rng = random.Random(seed)
    for index in range(count):
        yield natural_text(rng, 30) if index % 5 == 0 else hostile_text(rng)


@pytest.fixture(scope="module", params=sorted(PRE_TOKENIZERS))
def pair(request, tmp_path_factory):
    """Our tokenizer and llama.cpp's over the same trained vocabulary."""
    data = train(request.param, vocab_size=8000, num_words=60_000).data(request.param)
    path = tmp_path_factory.mktemp("vocabulary") / f"{request.param}.gguf"
    write_vocabulary(path, data)
    llama = LlamaVocabulary(path)
    yield request.param, Tokenizer(data), llama
    llama.close()


@pytest.mark.parametrize("parse_special", [False, True], ids=["plain", "parse_special"])
def test_ids_are_identical(pair, parse_special):
    """Both give the same ids, with and without control tokens found in the text."""
    pre, ours, llama = pair
    for text in _strings(NUM_STRINGS.get(pre, NUM_STRINGS_ELSE), seed=11):
        assert ours.encode(text, parse_special=parse_special, add_bos=False) == llama.encode(
            text, parse_special=parse_special
        ), repr(text)


def test_every_token_means_the_same(pair):
    """Size, bytes, kind and end-of-answer flag of every token agree."""
    _, ours, llama = pair
    assert ours.vocab_size == llama.vocab_size
    unknown = ours.token_id(UNKNOWN)
    for token_id in range(ours.vocab_size):
        assert ours.token_bytes(token_id) == llama.piece(token_id)
        assert ours.is_control(token_id) == (llama.is_control(token_id) or token_id == unknown)
        assert (token_id in ours.end_ids) == llama.is_end(token_id)


def test_bos_is_added_alike(pair):
    """The BOS token stands first when asked for, and the default follows the file."""
    _, ours, llama = pair
    assert ours.encode("hello") == llama.encode("hello", parse_special=False, add_bos=True)


@pytest.mark.parametrize("name", ["<|fim_suffix|>", "<PAD>", "</s>", "<|eom_id|>", "<|file_sep|>"])
@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user_defined"])
def test_well_known_names_are_control_tokens(tmp_path, name, kind):
    """A token with a well-known name steers the model, whatever type the file gives it."""
    base = train("qwen2", vocab_size=300, num_words=400)
    vocabulary = TrainedVocabulary((*base.tokens, name), (*base.token_types, kind), base.merges)
    data = vocabulary.data("qwen2")
    write_vocabulary(tmp_path / "v.gguf", data)
    ours, llama = Tokenizer(data), LlamaVocabulary(tmp_path / "v.gguf")
    token_id = ours.vocab_size - 1
    text = f"a{name}b"
    for parse_special in (False, True):
        assert ours.encode(text, parse_special=parse_special) == llama.encode(
            text, parse_special=parse_special
        )
    assert ours.is_control(token_id) == llama.is_control(token_id)
    assert (token_id in ours.end_ids) == llama.is_end(token_id)
    llama.close()
