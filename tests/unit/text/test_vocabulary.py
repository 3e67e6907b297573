"""TokenizerData: reading GGUF metadata and refusing what contradicts itself."""

from __future__ import annotations

import pytest

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.text.token_kinds import byte_alphabet
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData


class FakeMetadata(dict):
    """Metadata accessors over a dict of keys without their prefix."""

    def _get(self, key, default=None):
        if key not in self and default is None:
            raise ModelFileError("fake", f"{key} is missing", fix="add it")
        return self.get(key, default)

    get_str = get_int = get_bool = get_strings = get_ints = _get


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


@pytest.mark.parametrize("model", ["llama", "bert", "t5", "rwkv", "gemma4", ""])
def test_other_tokenizer_models(metadata, model):
    """Another tokenizer model is named, with the known ones, before anything else is read."""
    bare = FakeMetadata({"tokenizer.ggml.model": model})
    with pytest.raises(UnsupportedModelError, match="known: gpt2") as caught:
        TokenizerData.from_metadata(bare, path="m.gguf")
    assert caught.value.unsupported == (model or "(none named)",)
    assert caught.value.path == "m.gguf"


@pytest.mark.parametrize("pre", ["", "QWEN2", "deepseek-llm", "nonsense"])
def test_unknown_pre_tokenizer(metadata, pre):
    """An unknown pre-tokenizer is an error that names it and lists the known, never a default."""
    metadata["tokenizer.ggml.pre"] = pre
    with pytest.raises(UnsupportedModelError, match="olmo, qwen2, qwen35") as caught:
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
        ("padding_token_id", -1, "padding_token_id is -1"),
        ("fim_pad_token_id", 10**6, "fim_pad_token_id"),
        ("add_bos_token", True, "bos_token_id is missing"),
    ],
)
def test_contradictions(metadata, key, value, message):
    """Counts and ids that do not fit together are model file errors that name the key."""
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=message):
        TokenizerData.from_metadata(metadata)


def test_byte_alphabet_is_one_to_one():
    """256 characters for 256 bytes, the space among the moved ones."""
    table = byte_alphabet()
    assert sorted(table.values()) == list(range(256))
    assert table["Ġ"] == 0x20
