"""Incremental text: whole characters only, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.errors import RequestError
from thermocline.text.detokenizer import Detokenizer


class BytePerToken:
    """A vocabulary of the 256 bytes; id 256 is a control token."""

    def token_bytes(self, token_id):
        """The byte, or the text of the control token."""
        return b"<|end|>" if token_id == 256 else bytes([token_id])

    def is_control(self, token_id):
        """Only id 256."""
        return token_id == 256


@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
def test_pieces_join_to_the_whole_decoding(raw):
    """Pushed byte by byte, any bytes give what decoding them at once gives."""
    detokenizer = Detokenizer(BytePerToken())
    pieces = [detokenizer.push(byte) for byte in raw] + [detokenizer.flush()]
    assert "".join(pieces) == raw.decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_valid_text_never_shows_a_broken_character(text):
    """No piece of valid text holds U+FFFD that the text does not."""
    detokenizer = Detokenizer(BytePerToken())
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(piece == "" or piece in text for piece in pieces)


def test_cut_character_is_held_then_replaced_once():
    """Three of four bytes give nothing, the flush one U+FFFD, and then the stream is new."""
    detokenizer = Detokenizer(BytePerToken())
    assert [detokenizer.push(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(ord("a")) == "a"


@pytest.mark.parametrize(("show", "text"), [(False, "ab"), (True, "a<|end|>b")])
def test_control_tokens(show, text):
    """Control tokens add their text only when asked to."""
    detokenizer = Detokenizer(BytePerToken(), show_control=show)
    assert "".join(detokenizer.push(i) for i in (97, 256, 98)) == text


@given(st.text(max_size=30))
def test_with_a_real_vocabulary(tokenizer, text):
    """Ids of a text come back as that text."""
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text


def test_bad_id(tokenizer):
    """An id outside the vocabulary is a request error."""
    with pytest.raises(RequestError):
        Detokenizer(tokenizer).push(tokenizer.vocab_size)
