"""Names of models: what is one, what is none, and what is rather a path."""

from __future__ import annotations

import pytest

from thermocline.errors import HubError
from thermocline.hub.names import HubName, looks_like_name, parse_name


@pytest.mark.parametrize(
    ("text", "repo", "quant"),
    [
        ("Qwen/Qwen3-30B-A3B-GGUF", "Qwen/Qwen3-30B-A3B-GGUF", ""),
        ("a/b:Q4_K_M", "a/b", "Q4_K_M"),
        ("a/b:UD-IQ2_XXS", "a/b", "UD-IQ2_XXS"),
        ("a/b:BF16/model-00001-of-00002.gguf", "a/b", "BF16/model-00001-of-00002.gguf"),
        ("hf.co/a/b.c_d:q8_0", "a/b.c_d", "q8_0"),
        ("https://huggingface.co/a/b", "a/b", ""),
    ],
)
def test_names(text, repo, quant):
    """Repository and quantisation, also with the hub's address before them."""
    name = parse_name(text)
    assert name == HubName(repo, quant)
    assert looks_like_name(text)
    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "", "model", "a/b/c", "/a/b", "./a", "../a", "a/..", "a/b:", "a/b:-x", "a/b:\n", "a/b c", "a--x/b", "a/b..c",
        "a/b:../../etc\x00", "-a/b", "a/b-", "a/b\n", "https://example.org/a/b", "a/" + "b" * 97,
    ],
)  # fmt: skip
def test_what_is_no_name(text):
    """Everything else is an error that says how names are written."""
    with pytest.raises(HubError, match="ORG/REPO"):
        parse_name(text)
    assert not looks_like_name(text)


@pytest.mark.parametrize("text", ["models/a.gguf", "models/a.GGUF:Q4_K_M"])
def test_a_gguf_file_is_a_path(text):
    """Nobody calls a repository so, and many call a file so."""
    assert not looks_like_name(text)
