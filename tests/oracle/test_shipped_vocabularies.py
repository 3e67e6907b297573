"""The vocabularies that llama.cpp ships with expected ids: all open, all give its ids."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("llama_cpp")

from tests.oracle.llama_source import vocabulary_file
from tests.oracle.llama_vocabulary import LlamaVocabulary
from tests.oracle.token_strings import assert_same_ids, assert_same_tokens, random_strings
from tests.unit.text.vocabularies import NAMED_BYTE
from thermocline.errors import RequestError, UnsupportedModelError
from thermocline.modelfile.reader import open_model_file
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData

pytestmark = pytest.mark.oracle

NUM_STRINGS = 10_000  # plain, and as many with special tokens
NAMES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
# Their detokenizer changes the text (" ?" becomes "?"), which nobody wants of an answer.
CLEANS_SPACES = {"falcon", "gemma-4", "gpt-2", "llama-bpe", "mpt", "refact", "starcoder"}


def _read(name: str) -> TokenizerData:
    path = str(vocabulary_file(name))
    with open_model_file(path) as file:
        return TokenizerData.from_metadata(file.metadata, path=path)


def _writable(ours: Tokenizer, texts):
    """Falcon has no token for some control characters: we refuse those texts, llama.cpp drops them."""
    lacking = [char for char in map(chr, range(32)) if _lacks(ours, char)]
    return (text for text in texts if not any(char in text for char in lacking))


def _lacks(ours: Tokenizer, char: str) -> bool:
    try:
        ours.encode(char)
    except RequestError:
        return True
    return False


@pytest.fixture(scope="module", params=NAMES)
def shipped(request):
    """Name, our tokenizer, llama.cpp's, texts of some special tokens."""
    data = _read(request.param)
    ours = Tokenizer(data)
    llama = LlamaVocabulary(vocabulary_file(request.param))
    special = [
        t for t, kind in zip(data.tokens, data.token_types, strict=True) if kind in (2, 3, 4)
    ]
    random.Random(3).shuffle(special)
    yield request.param, ours, llama, [*special[:40], NAMED_BYTE, "\u2581", "</s>"]
    llama.close()


def test_own_cases(shipped):
    """The ids that llama.cpp's own tests expect."""
    name, ours, _, _ = shipped
    path = vocabulary_file(name)
    cases = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_suffix(".gguf.out").read_text().splitlines()
    if not cases[-1]:
        del cases[-1]
    for text, ids in zip(cases, expected, strict=True):
        assert ours.encode(text, add_bos=False) == [int(each) for each in ids.split()], repr(text)


@pytest.mark.parametrize("parse_special", [False, True], ids=["plain", "parse_special"])
def test_random_strings(shipped, parse_special):
    """Random strings with this vocabulary's special tokens give the same ids."""
    _, ours, llama, special = shipped
    texts = _writable(ours, random_strings(NUM_STRINGS, seed=29, specials=special))
    assert_same_ids(ours, llama, texts, parse_special=parse_special)


def test_every_token(shipped):
    """Bytes, kind and end-of-answer flag of every token agree."""
    _, ours, llama, _ = shipped
    assert_same_tokens(ours, llama)


def test_what_is_added(shipped):
    """BOS and EOS are added alike by default, to a text and to no text."""
    _, ours, llama, _ = shipped
    for text in ("", "hello", " hello"):
        assert ours.encode(text) == llama.encode(text, parse_special=False, add_special=True)


@pytest.mark.parametrize("skip_special", [False, True])
def test_decoding(shipped, skip_special):
    """Ids come back as the same text, with what was added and without."""
    name, ours, llama, special = shipped
    for text in _writable(ours, random_strings(2_000, seed=31, specials=special)):
        for ids in (ours.encode(text, parse_special=True), ours.encode(text, add_bos=False)):
            if name in CLEANS_SPACES:
                continue
            expected = llama.decode(ids, skip_special=skip_special).decode("utf-8", "replace")
            assert ours.decode(ids, skip_special) == expected, repr(text)


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe"])
def test_other_kinds_are_refused(name):
    """WordPiece and Unigram vocabularies are named as not supported."""
    with pytest.raises(UnsupportedModelError, match="unknown tokenizer model") as caught:
        _read(name)
    assert caught.value.unsupported == ({"bert-bge": "bert", "nomic-bert-moe": "t5"}[name],)


@pytest.mark.parametrize("name", ["aquila", "gpt-neox"])
def test_no_pre_tokenizer_is_refused(name):
    """A file that does not say how to cut text is refused: llama.cpp guesses, and warns."""
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer"):
        _read(name)


def test_sentencepiece_without_a_pre_tokenizer():
    """Old SentencePiece files name no pre-tokenizer and need none."""
    ours, llama = Tokenizer(_read("baichuan")), LlamaVocabulary(vocabulary_file("baichuan"))
    assert_same_ids(ours, llama, random_strings(2_000, seed=37), parse_special=True)
    assert_same_tokens(ours, llama)
    llama.close()
