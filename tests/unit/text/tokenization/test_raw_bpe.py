"""BPE over characters: spaces, bytes, and runs of line ends."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.text.vocabularies import train_raw
from thermocline.errors import RequestError
from thermocline.text.detokenizer import Detokenizer
from thermocline.text.tokenization.raw_bpe import RawBpe
from thermocline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def trained():
    """A small vocabulary with a token for every byte."""
    return train_raw(vocab_size=700, num_words=4000)


@pytest.fixture(scope="module")
def gemma(trained):
    """As Gemma 4's."""
    return Tokenizer(trained.data("gemma4"))


@given(text=st.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_decode_undoes_encode(gemma, text):
    """Any text comes back exactly, at once and token by token."""
    ids = gemma.encode(text)
    detokenizer = Detokenizer(gemma)
    assert gemma.decode(ids) == text
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text


def test_runs_of_line_ends(trained, gemma):
    """A run that is a token is that token although no merge builds it; other runs are merged."""
    size = next(len(text) for text in trained.tokens if len(text) > 2 and text == "\n" * len(text))
    run, sarvam = "\n" * size, Tokenizer(trained.data("sarvam-moe"))
    whole = gemma.token_id(run)
    assert gemma.encode(f"a{run}b") == [*gemma.encode("a"), whole, *gemma.encode("b")]
    assert whole not in sarvam.encode(f"a{run}b")
    assert whole not in gemma.encode(run + "\n")


def test_merges_reach_over_spaces(trained):
    """Nothing is cut within a line."""
    tokens = ("a", "b", "\u2581", "a\u2581", "a\u2581b", "\n")
    id_of = {text: index for index, text in enumerate(tokens)}
    engine = RawBpe(id_of, [("a", "\u2581"), ("a\u2581", "b")], whole_line_ends=True)
    assert [*chain(*engine.encode("a b\na b"))] == [4, 5, 4]
    assert engine.piece_bytes("a\u2581b") == b"a b"


def test_a_vocabulary_without_bytes_refuses(trained):
    """A character that can not be written is refused, with the byte."""
    tokens = [text.replace("<0xF3>", "[GONE]") for text in trained.tokens]
    tokenizer = Tokenizer(trained.data("gemma4", tokens=tokens))
    assert tokenizer.encode("hello")
    with pytest.raises(RequestError, match="0xf3"):
        tokenizer.encode("\U000f1234")
