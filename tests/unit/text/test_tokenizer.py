"""Encoding and decoding: the golden ids of llama.cpp, round trips, special tokens, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.text.vocabularies import (
    CONTROL,
    FIM,
    GOLDEN_CASES,
    NAMED_BYTE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TrainedVocabulary,
)
from thermocline.errors import ModelFileError, RequestError
from thermocline.text.tokenization.pretokenizers import PRE_TOKENIZERS
from thermocline.text.tokenization.token_kinds import TokenType
from thermocline.text.tokenizer import Tokenizer

# The first name of each row: the others have the same row.
_ROWS = sorted({row: name for name, row in reversed(PRE_TOKENIZERS.items())}.values())
GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer_llama_cpp.json"


@pytest.fixture(scope="module")
def golden():
    """Strings and ids made by tests/oracle/make_tokenizer_golden.py."""
    return json.loads(GOLDEN.read_text())


def _opened(golden, case: str) -> Tokenizer:
    """The golden vocabulary of a pre-tokenizer, or of a SentencePiece case."""
    is_pieces = case in GOLDEN_CASES
    is_raw = not is_pieces and PRE_TOKENIZERS[case].is_raw
    kind = "pieces" if is_pieces else "raw" if is_raw else "bytes"
    vocabulary = TrainedVocabulary(**golden["vocabularies"][kind])
    changes = GOLDEN_CASES[case] if is_pieces else {"add_bos": is_raw}
    return Tokenizer(vocabulary.data("default" if is_pieces else case, **changes))


@pytest.mark.parametrize("case", [*_ROWS, *GOLDEN_CASES])
def test_golden_ids(golden, case):
    """Every row of the table and every kind of vocabulary gives llama.cpp's ids, BOS and EOS included."""
    tokenizer = _opened(golden, case)
    for mode, answers in golden["ids"][case].items():
        for text, answer in zip(golden["strings"], answers, strict=True):
            ids = tokenizer.encode(text, parse_special=mode == "special")
            assert ids == golden["answers"][answer], text


def test_golden_file_is_complete(golden):
    """No row of the table and no case is left out."""
    assert set(golden["ids"]) == {*_ROWS, *GOLDEN_CASES}


@given(st.text(max_size=60))
def test_decode_undoes_encode(tokenizer, text):
    """Any text comes back exactly, whatever it holds; no normalisation takes place."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40))
def test_bytes_of_the_ids_are_the_bytes_of_the_text(tokenizer, text):
    """token_bytes joined is the UTF-8 of the text."""
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize("name", CONTROL)
def test_control_tokens_only_on_request(tokenizer, name):
    """A control token's text becomes the token with parse_special, and never without."""
    token_id = tokenizer.token_id(name)
    plain = tokenizer.encode(f"a{name}b")
    assert token_id not in plain
    assert not any(tokenizer.is_control(i) for i in plain)
    assert token_id in tokenizer.encode(f"a{name}b", parse_special=True)


@pytest.mark.parametrize("name", USER_DEFINED)
def test_user_defined_tokens_always(tokenizer, name):
    """A user-defined token is found in any text."""
    assert tokenizer.token_id(name) in tokenizer.encode(f"a{name}b")


def test_longest_special_token_is_taken_first(tokenizer):
    """Where special tokens overlap, the one with more bytes wins over the whole text."""
    inner, outer = tokenizer.token_id("<think>"), tokenizer.token_id("<<think>>")
    assert tokenizer.encode("<<think>>") == [outer]
    assert inner in tokenizer.encode("<<think>")


def test_fill_in_the_middle_name_is_control(tokenizer):
    """A well-known steering token that the file calls user-defined is a control token."""
    assert tokenizer.is_control(tokenizer.token_id(FIM))


def test_bytes_of_odd_tokens(tokenizer):
    """Named bytes give the byte, unused tokens nothing, control and unknown tokens their text."""
    expected = {NAMED_BYTE: b"\n", UNUSED: b"", UNKNOWN: b"<unk>", "<|im_end|>": b"<|im_end|>"}
    assert {text: tokenizer.token_bytes(tokenizer.token_id(text)) for text in expected} == expected


def test_token_outside_the_byte_alphabet_gives_its_own_text(vocabulary):
    """A normal token that no byte string spells is taken as plain text."""
    odd = TrainedVocabulary(
        (*vocabulary.tokens, "日"), (*vocabulary.token_types, 1), vocabulary.merges
    )
    tokenizer = Tokenizer(odd.data("qwen2"))
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == "日".encode()


def test_decode_hides_control_tokens_unless_asked(tokenizer):
    """skip_special leaves control tokens out, False shows them."""
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", parse_special=True)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_decode_replaces_broken_bytes(tokenizer):
    """Half a character decodes to U+FFFD."""
    first = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.decode([first]) == "\ufffd"


def test_ends_of_an_answer(tokenizer):
    """EOS and the well-known names end an answer, other control tokens do not."""
    assert {tokenizer.token_text(i) for i in tokenizer.end_ids} == {"<|im_end|>", "<|endoftext|>"}


def test_bos(vocabulary):
    """BOS follows the file unless the call says otherwise."""
    tokenizer = Tokenizer(vocabulary.data("qwen2", add_bos=True))
    assert tokenizer.encode("") == [tokenizer.bos_id]
    assert tokenizer.encode("", add_bos=False) == []
    without = Tokenizer(vocabulary.data("qwen2", bos_id=None))
    with pytest.raises(RequestError, match="no BOS token"):
        without.encode("a", add_bos=True)


@pytest.mark.parametrize("bad", [-1, 10**9, "size"])
def test_bad_ids(tokenizer, bad):
    """Ids outside the vocabulary are request errors in every call that takes one."""
    token_id = tokenizer.vocab_size if bad == "size" else bad
    for call in (tokenizer.token_bytes, tokenizer.is_control, tokenizer.token_text):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            call(token_id)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        tokenizer.decode([token_id])


def test_half_a_surrogate_pair(tokenizer):
    """Text that is not valid Unicode is refused, with the place."""
    with pytest.raises(RequestError, match="character 2"):
        tokenizer.encode("ab\ud800")


def test_too_much_text(vocabulary):
    """The limit is in bytes, and is checked before any work."""
    tokenizer = Tokenizer(vocabulary.data("qwen2"), max_text_bytes=4)
    assert tokenizer.encode("éé")
    with pytest.raises(RequestError, match="at most 4"):
        tokenizer.encode("ééa")


def test_vocabulary_without_a_byte(vocabulary):
    """A byte that the vocabulary lacks is refused, not dropped; other text works."""
    tokens = list(vocabulary.tokens)
    tokens[tokens.index("z")] = "[GONE]"
    lacking = TrainedVocabulary(
        tuple(tokens),
        vocabulary.token_types,
        tuple(m for m in vocabulary.merges if "z" not in m),
    )
    tokenizer = Tokenizer(lacking.data("qwen2"))
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(RequestError, match="0x7a"):
        tokenizer.encode("abz")


def test_empty_tokens_get_a_name(vocabulary):
    """An empty token text is no crash and no match."""
    changed = TrainedVocabulary(
        (*vocabulary.tokens, ""),
        (*vocabulary.token_types, int(TokenType.CONTROL)),
        vocabulary.merges,
    )
    tokenizer = Tokenizer(changed.data("qwen2"))
    last = tokenizer.vocab_size - 1
    assert tokenizer.token_text(last) == f"[EMPTY_{last}]"
    assert tokenizer.decode(tokenizer.encode("abc", parse_special=True)) == "abc"


@pytest.mark.parametrize("merges", [("ab",), ("",), ("a ",)])
def test_bad_merges(vocabulary, merges):
    """A merge of one token is a model file error."""
    with pytest.raises(ModelFileError, match="not two tokens"):
        Tokenizer(vocabulary.data("qwen2", merges=merges))


def test_merges_of_texts_that_are_no_tokens(vocabulary):
    """A merge may lead over a text that is no token; where it ends in one, its characters stand."""
    longer = TrainedVocabulary(
        (*vocabulary.tokens, "zqz"),
        (*vocabulary.token_types, 1),
        ("z q", "zq z", "q 7", *vocabulary.merges),
    )
    tokenizer = Tokenizer(longer.data("qwen2"))
    z, q, last = tokenizer.token_id("z"), tokenizer.token_id("q"), tokenizer.vocab_size - 1
    assert tokenizer.encode("zqz") == [last]
    assert tokenizer.encode("zqzzq") == [last, z, q]


def test_repeated_merge_keeps_its_first_rank(vocabulary):
    """A merge that stands twice counts where it stands first."""
    repeated = (*vocabulary.merges, *vocabulary.merges[:5])
    text = "the hello world of tokens"
    assert Tokenizer(vocabulary.data("qwen2", merges=repeated)).encode(text) == Tokenizer(
        vocabulary.data("qwen2")
    ).encode(text)


def test_two_tokens_with_one_text(vocabulary):
    """Duplicate tokens are a model file error that names both ids."""
    doubled = TrainedVocabulary(
        (*vocabulary.tokens, "a"), (*vocabulary.token_types, 1), vocabulary.merges
    )
    with pytest.raises(ModelFileError, match=f"and {len(vocabulary.tokens)} are both 'a'"):
        Tokenizer(doubled.data("qwen2"))


@pytest.mark.parametrize("field", ["tokens", "merges"])
def test_what_a_file_spells_is_not_told_whole(vocabulary, field):
    """An error about a text of a megabyte shows its beginning."""
    long = "a" * (1 << 20)
    tokens, types, merges = vocabulary.tokens, vocabulary.token_types, vocabulary.merges
    if field == "tokens":
        tokens, types = (*tokens, long, long), (*types, 1, 1)
    else:
        merges = (*merges, long)
    with pytest.raises(ModelFileError, match=r"'a{77}\.\.\.'") as caught:
        Tokenizer(TrainedVocabulary(tokens, types, merges).data("qwen2"))
    assert len(str(caught.value)) < 500


def test_repr_names_the_file(tokenizer):
    """The repr says where the vocabulary came from and how large it is."""
    assert (
        repr(tokenizer)
        == f"Tokenizer(path='trained vocabulary', vocab_size={tokenizer.vocab_size})"
    )


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def test_harmony_markers_are_shown_and_not_forged(vocabulary):
    """The markers of channels are text of an answer, end nothing, and come from no user."""
    types = (*vocabulary.token_types, *[int(TokenType.CONTROL)] * len(HARMONY))
    harmony = TrainedVocabulary((*vocabulary.tokens, *HARMONY), types, vocabulary.merges)
    tokenizer = Tokenizer(harmony.data("qwen2"))
    text = "<|start|>a<|channel|>b<|message|>c<|end|>"
    ids = tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & tokenizer.end_ids
    assert set(HARMONY) <= tokenizer.control_texts
    assert not {tokenizer.token_id(name) for name in HARMONY} & set(tokenizer.encode(text))
    ends = {tokenizer.token_id(name) for name in ("<|return|>", "<|call|>")}
    assert ends <= tokenizer.end_ids


def test_eos_is_added_only_by_default(vocabulary):
    """A file that wants EOS gets it after a text, and not where the caller says what is added."""
    tokenizer = Tokenizer(vocabulary.data("qwen2", add_eos=True))
    eos = tokenizer.eos_id
    assert tokenizer.encode("")[-1:] == [eos]
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    for add_bos in (False, True):
        assert eos not in tokenizer.encode("hello", add_bos=add_bos)
    assert eos not in tokenizer.encode_parts(["hello"])
    assert eos not in tokenizer.encode_more("hello")
