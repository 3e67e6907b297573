"""TokenizerData: reading GGUF metadata and refusing what contradicts itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.text.tokenization.token_kinds import byte_alphabet
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData


class FakeMetadata(dict):
    """Metadata accessors over a dict of keys without their prefix."""

    def _get(self, key, default=None):
        if key not in self and default is None:
            raise ModelFileError("fake", f"{key} is missing", fix="add it")
        return self.get(key, default)

    get_str = get_int = get_bool = get_strings = get_ints = get_floats = _get


@pytest.fixture
def metadata(vocabulary):
    """A complete set of tokenizer keys."""
    return FakeMetadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": vocabulary.tokens,
            "tokenizer.ggml.token_type": vocabulary.token_types,
            "tokenizer.ggml.merges": vocabulary.merges,
            "tokenizer.ggml.eos_token_id": vocabulary.tokens.index("<|im_end|>"),
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
        }
    )


def test_reads_all_keys(metadata, vocabulary):
    """What the file says arrives; what it does not say is None or the default."""
    data = TokenizerData.from_metadata(metadata, path="m.gguf")
    assert (data.model, data.pre, data.path) == ("gpt2", "qwen2", "m.gguf")
    assert data.tokens == vocabulary.tokens
    assert data.eos_id == vocabulary.tokens.index("<|im_end|>")
    assert data.padding_id == 0
    assert (data.bos_id, data.eot_id, data.unknown_id, data.add_bos) == (None, None, None, False)
    assert Tokenizer(data).encode("hi")


def test_tokens_of_no_answer_are_read(metadata, vocabulary):
    """Files of Gemma 4 name tokens that stand for images and sounds; ids that are none are left out, as in llama.cpp."""
    assert Tokenizer(TokenizerData.from_metadata(metadata)).never_ids == frozenset()
    metadata["tokenizer.ggml.suppress_tokens"] = (3, -1, 5, len(vocabulary.tokens))
    assert Tokenizer(TokenizerData.from_metadata(metadata)).never_ids == {3, 5}


PAGE = (Path(__file__).parents[3] / "docs" / "vocabularies.md").read_text()
MODELS = re.findall(r"^\| [^|]+ \| [^|]+ \| `(\w+)` \| ([^|]+) \| (?:shipped|trained)", PAGE, re.M)


@pytest.mark.parametrize(("model", "names"), MODELS)
def test_models_of_the_documentation_open(model, names):
    """Every vocabulary that docs/vocabularies.md lists by model is one that opens."""
    for pre in re.findall("`([^`]+)`", names) or [""]:
        data = TokenizerData(
            model=model,
            pre="gemma4" if model == "gemma4" else pre,
            tokens=("<unk>", "<s>", "</s>", "a"),
            token_types=(2, 3, 3, 1),
            scores=(0.0,) * 4,
        )
        assert Tokenizer(data).encode("a") == [3]


def test_documentation_lists_models():
    """The table above was found, with all its rows."""
    assert len(MODELS) >= 20


def test_missing_token_types_mean_normal(metadata):
    """A file without token types has normal tokens only."""
    del metadata["tokenizer.ggml.token_type"]
    assert set(TokenizerData.from_metadata(metadata).token_types) == {1}


def test_add_bos_default_follows_the_pre_tokenizer(metadata):
    """Llama 3 vocabularies add BOS unless the file says no."""
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    metadata["tokenizer.ggml.bos_token_id"] = 5
    assert TokenizerData.from_metadata(metadata).add_bos
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert not TokenizerData.from_metadata(metadata).add_bos


def test_fim_id_in_the_file_leaves_the_name_alone(metadata, vocabulary):
    """Where the file names the id of a fill-in kind, its type stays what the file says."""
    fim = vocabulary.tokens.index("<|fim_prefix|>")
    assert Tokenizer(TokenizerData.from_metadata(metadata)).is_control(fim)
    metadata["tokenizer.ggml.fim_pre_token_id"] = fim
    assert not Tokenizer(TokenizerData.from_metadata(metadata)).is_control(fim)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", ""])
def test_other_tokenizer_models(metadata, model):
    """Another tokenizer model is named, with the known ones, before anything else is read."""
    bare = FakeMetadata({"tokenizer.ggml.model": model})
    with pytest.raises(UnsupportedModelError, match="known: gpt2, llama, gemma4") as caught:
        TokenizerData.from_metadata(bare, path="m.gguf")
    assert caught.value.unsupported == (model or "(none named)",)
    assert caught.value.path == "m.gguf"


@pytest.mark.parametrize("pre", ["", "QWEN2", "superbpe", "nonsense"])
def test_unknown_pre_tokenizer(metadata, pre):
    """An unknown pre-tokenizer is an error that names it and lists the known, never a default."""
    metadata["tokenizer.ggml.pre"] = pre
    with pytest.raises(
        UnsupportedModelError, match="phi-2, pixtral, poro-chat, qwen2, qwen35"
    ) as caught:
        TokenizerData.from_metadata(metadata)
    assert caught.value.unsupported == (pre or "(none named)",)


@pytest.mark.parametrize("missing", ["tokens", "merges"])
def test_missing_keys(metadata, missing):
    """Tokens and merges must be there."""
    del metadata[f"tokenizer.ggml.{missing}"]
    with pytest.raises(ModelFileError, match=missing):
        TokenizerData.from_metadata(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("token_type", (1, 1), "2 entries"),
        ("tokens", (), "empty"),
        ("eos_token_id", 10**6, "eos_token_id is 1000000"),
        ("bos_token_id", 2**32 - 1, "bos_token_id"),
        ("eot_token_id", -1, "eot_token_id is -1"),
        ("eom_token_id", 10**6, "eom_token_id"),
        ("prefix_token_id", 10**6, "fim_pre_token_id"),
        ("fim_pad_token_id", 10**6, "fim_pad_token_id"),
        ("add_bos_token", True, "a BOS token.*bos_token_id is missing"),
    ],
)
def test_contradictions(metadata, key, value, message):
    """Counts and ids that do not fit together are model file errors that name the key."""
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=message):
        TokenizerData.from_metadata(metadata)


def test_eos_to_be_added_must_be_there(metadata):
    """A file that wants EOS after each text must say which token it is."""
    metadata["tokenizer.ggml.add_eos_token"] = True
    assert TokenizerData.from_metadata(metadata).add_eos
    del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ModelFileError, match=r"an EOS token.*eos_token_id is missing"):
        TokenizerData.from_metadata(metadata)


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32 - 1])
def test_an_id_that_is_not_needed_may_be_wrong(metadata, token_id):
    """Many files pad with a token past the end; nothing here pads."""
    metadata["tokenizer.ggml.padding_token_id"] = token_id
    metadata["tokenizer.ggml.unknown_token_id"] = token_id
    data = TokenizerData.from_metadata(metadata)
    assert (data.padding_id, data.unknown_id) == (None, None)


def test_keys_that_change_nothing_are_accepted(metadata):
    """Keys for other kinds of tokenizer, and keys nobody knows, are left alone."""
    before = TokenizerData.from_metadata(metadata)
    for key, value in {
        "scores": (0.5,),
        "add_sep_token": True,
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": (1, 2),
        "cls_token_id": 10**6,
        "seperator_token_id": 10**6,
        "mask_token_id": 3,
        "token_type_count": 2,
        "never_heard_of": "x",
    }.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    assert TokenizerData.from_metadata(metadata) == before


def test_older_names_of_fill_in_the_middle(metadata):
    """prefix, suffix and middle are what older converters call the ids; the newer name wins."""
    metadata["tokenizer.ggml.prefix_token_id"] = 3
    metadata["tokenizer.ggml.middle_token_id"] = 4
    metadata["tokenizer.ggml.fim_mid_token_id"] = 5
    assert TokenizerData.from_metadata(metadata).fim_ids == {"fim_pre": 3, "fim_mid": 5}


@pytest.fixture
def pieces():
    """A SentencePiece vocabulary that says no more than it must."""
    return FakeMetadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ("<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"),
            "tokenizer.ggml.token_type": (2, 3, 3, 1, 1, 1),
            "tokenizer.ggml.scores": (0.0, 0.0, 0.0, -1.0, -1.0, 0.0),
        }
    )


def test_what_sentencepiece_means_without_saying(pieces):
    """The first three tokens are <unk>, <s> and </s>; BOS and a space go before the text."""
    data = TokenizerData.from_metadata(pieces)
    assert (data.unknown_id, data.bos_id, data.eos_id) == (0, 1, 2)
    assert (data.add_bos, data.add_eos, data.add_space_prefix) == (True, False, True)
    assert Tokenizer(data).encode("a") == [1, 5]


def test_what_sentencepiece_says(pieces):
    """The file decides about spaces, BOS and EOS."""
    for key, value in {
        "add_space_prefix": False,
        "add_bos_token": False,
        "add_eos_token": True,
        "eos_token_id": 1,
    }.items():
        pieces[f"tokenizer.ggml.{key}"] = value
    assert Tokenizer(TokenizerData.from_metadata(pieces)).encode("a") == [4, 1]


def test_scores_must_fit(pieces):
    """No scores are all the same; too few are a model file error."""
    del pieces["tokenizer.ggml.scores"]
    assert Tokenizer(TokenizerData.from_metadata(pieces)).encode("a") == [1, 5]
    pieces["tokenizer.ggml.scores"] = (1.0,)
    with pytest.raises(ModelFileError, match="scores has 1 entries for 6 tokens"):
        TokenizerData.from_metadata(pieces)


@pytest.mark.parametrize(("name", "swallows"), [("Phi3", True), ("Phi-3 Mini", True), ("x", False)])
def test_phi3_is_known_by_its_name(pieces, name, swallows):
    """Only the model's name tells that special tokens take in the blanks after them."""
    pieces["general.name"] = name
    assert TokenizerData.from_metadata(pieces).swallows_blanks is swallows


def test_gemma4_adds_bos_whatever_the_file_says(metadata):
    """Files with add_bos_token false are around, and the model needs BOS."""
    metadata["tokenizer.ggml.model"] = "gemma4"
    metadata["tokenizer.ggml.bos_token_id"] = 7
    del metadata["tokenizer.ggml.pre"]
    assert (data := TokenizerData.from_metadata(metadata)).add_bos
    assert data.pre == "gemma4"


def test_kimi_k2_may_have_no_merges(metadata):
    """Its converter can leave them out; then only single characters are tokens."""
    metadata["tokenizer.ggml.pre"] = "kimi-k2"
    del metadata["tokenizer.ggml.merges"]
    assert len(Tokenizer(TokenizerData.from_metadata(metadata)).encode("the")) == 3


def test_byte_alphabet_is_one_to_one():
    """256 characters for 256 bytes, the space among the moved ones."""
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert table["Ġ"] == 0x20
