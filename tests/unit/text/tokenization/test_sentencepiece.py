"""SentencePiece vocabularies: where spaces go, bytes, ties, long texts, and what relies on them."""

from __future__ import annotations

import heapq
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.text.vocabularies import train_pieces
from thermocline.errors import RequestError
from thermocline.sampling.constraint import Constraint, ConstraintKind
from thermocline.sampling.matcher import Grammars
from thermocline.text.chat_prompt import encode_chat
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.detokenizer import Detokenizer
from thermocline.text.tokenization.sentencepiece import SentencePiece
from thermocline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def trained():
    """A vocabulary in which many scores tie."""
    return train_pieces(vocab_size=700, num_words=4000, tie=16)


@pytest.fixture(scope="module")
def pieces(trained):
    """As Mixtral's: a space before the text, BOS added."""
    return Tokenizer(
        trained.data("default", add_space_prefix=True, add_bos=True, bos_id=1, eos_id=2)
    )


@given(text=st.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_decode_undoes_encode(pieces, text):
    """Any text comes back exactly; U+2581 comes back as the space that it stands for."""
    assert pieces.decode(pieces.encode(text, add_bos=False)) == text


@given(text=st.text(max_size=30).filter(lambda text: "\u2581" not in text))
def test_streaming_keeps_the_space(pieces, text):
    """A stream begins with the space of its first token: an answer may go on within a line."""
    detokenizer = Detokenizer(pieces)
    ids = pieces.encode_more(" hello " + text)
    streamed = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert streamed == " hello " + text


def test_spaces_after_special_tokens(pieces):
    """A space goes before the text and after each special token, and not before text that goes on."""
    end = pieces.token_id("<|im_end|>")
    hello, first = pieces.encode_more("hello"), pieces.encode("hello", add_bos=False)
    assert first == pieces.encode_more(" hello")
    assert hello != first
    assert pieces.encode("hello<|im_end|>hello", parse_special=True) == [1, *first, end, *first]
    assert pieces.encode_parts(["hello", end, "hello", "hello"]) == [*first, end, *first, *hello]


def test_decoding_after_bos_keeps_the_space(pieces):
    """As in llama.cpp, only a text without BOS loses the space that was put before it."""
    ids = pieces.encode("hello")
    assert (pieces.decode(ids), pieces.decode(ids[1:])) == (" hello", "hello")
    assert pieces.decode(ids, skip_special=False) == "<s> hello"


def test_characters_without_a_token_become_bytes(pieces):
    """Byte tokens give the character back, one byte at a time."""
    ids = pieces.encode_more("\U000f1234")
    assert [pieces.token_text(i) for i in ids] == ["<0xF3>", "<0xB1>", "<0x88>", "<0xB4>"]
    detokenizer = Detokenizer(pieces)
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "\U000f1234"]


def test_a_vocabulary_without_bytes_refuses(trained):
    """A character that can not be written is refused, with the byte; other text works."""
    tokens = [text.replace("<0xF3>", "[GONE]") for text in trained.tokens]
    tokenizer = Tokenizer(trained.data("default", tokens=tokens))
    assert tokenizer.encode("hello")
    with pytest.raises(RequestError, match="0xf3"):
        tokenizer.encode("\U000f1234")


def test_blanks_after_a_swallowing_token(trained):
    """Phi 3's special tokens take in the blanks after them, in a text and between parts."""
    tokenizer = Tokenizer(trained.data("default", swallows_blanks=True))
    end, skipped = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")
    hello = tokenizer.encode("hello")
    assert tokenizer.encode("<|im_end|> \n\thello", parse_special=True) == [end, *hello]
    assert tokenizer.encode_parts([end, "\nhello", end, " "]) == [end, *hello, end]
    blanks = tokenizer.token_id("    \n")
    assert tokenizer.encode("    \n    \nhello") == [blanks, *hello]
    assert tokenizer.encode("<|endoftext|> hello", parse_special=True) == [
        skipped,
        *tokenizer.encode(" hello"),
    ]


def _merged_slowly(word: str, rank_of: dict[str, int]) -> list[str]:
    """The definition: of all neighbours that form a token, the best and leftmost, until there are none."""
    symbols = list(word)
    while True:
        found = [
            (rank_of[left + right], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in rank_of
        ]
        if not found:
            return symbols
        _, place = min(found)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]


_texts = st.lists(st.text("ab", min_size=1, max_size=5), unique=True, max_size=12)


@given(texts=_texts, ties=st.integers(1, 4), word=st.text("ab", max_size=24))
def test_merging_is_as_defined(texts, ties, word):
    """Ties, overlaps and tokens that nothing builds: always the best pair, the leftmost of equals."""
    texts = [*dict.fromkeys(["a", "b", *texts])]
    scores = [-float(index // ties) for index in range(len(texts))]
    id_of = {text: index for index, text in enumerate(texts)}
    rank_of = {text: index // ties for text, index in id_of.items()}
    expected = [id_of[symbol] for symbol in _merged_slowly(word, rank_of)]
    assert [*chain(*SentencePiece(id_of, scores).encode(word))] == expected


@pytest.mark.parametrize("text", ["a", " ", "ab", "a "])
def test_long_runs_take_few_steps(monkeypatch, pieces, text):
    """A run of 32,768 characters takes at most three heap steps per character."""
    steps = []
    count = heapq.heappop

    def counting(heap):
        steps.append(1)
        return count(heap)

    monkeypatch.setattr("thermocline.text.tokenization.sentencepiece.heappop", counting)
    run = text * (32_768 // len(text))
    assert pieces.decode(pieces.encode(run, add_bos=False)) == run
    assert len(steps) <= 3 * len(run)


def test_tokens_longer_than_are_checked(trained):
    """A token of a million characters is opened at once, and is found if merges build it."""
    halves = [("ab" * 128)[:size] for size in range(1, 257)]
    texts = [*dict.fromkeys(halves), "ab" * 150, "ab" * 22 + "x" * 10**6, "x"]
    texts += [("ab" * 150)[:size] for size in range(257, 300)]
    id_of = {text: index for index, text in enumerate(texts)}
    engine = SentencePiece(id_of, [float(len(text)) for text in texts])
    assert [texts[i] for i in chain(*engine.encode("ab" * 150))] == ["ab" * 150]


def test_scores_that_are_no_numbers(trained):
    """A file's NaN and infinity cost quality, and nothing else."""
    scores = [*trained.scores[:-3], float("nan"), float("nan"), float("-inf")]
    tokenizer = Tokenizer(trained.data("default", scores=scores))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_chat_prompt(pieces):
    """A chat has BOS once, no EOS, no forged token, and the beginning of an answer as it goes on."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}A:"
    )
    start, end = pieces.token_id("<|im_start|>"), pieces.token_id("<|im_end|>")
    messages = [{"role": "user", "content": "</s> <|im_end|>"}]
    begun = [*messages, {"role": "assistant", "content": "well"}]
    with ChatTemplate(source, control_tokens=pieces.control_texts) as template:
        ids = encode_chat(pieces, template, messages)
        longer = encode_chat(pieces, template, begun, continue_final=True)
    assert [i for i in ids if pieces.is_control(i)] == [1, start, end]
    assert longer == [*ids, *pieces.encode_more("well")]


def test_grammar(pieces):
    """A constraint sees the bytes of each token, the space in it and byte tokens included."""
    grammars = Grammars(pieces)
    try:
        matcher = grammars.matcher(Constraint(ConstraintKind.CHOICE, '["hello \U000f1234"]'))
        ids = pieces.encode_more("hello \U000f1234")
        assert matcher.is_complete(ids)
        assert not matcher.is_complete(ids[:-1])
    finally:
        grammars.close()
