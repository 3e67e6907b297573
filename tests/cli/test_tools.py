"""`tokenize`, `logits` and `bench`."""

from __future__ import annotations

import json

import numpy as np
import pytest

REFERENCE = ("--kernels", "reference")


def test_tokenize_prints_one_token_per_line(toy, invoke):
    """Ids stand beside their text; a part of a character is shown as bytes."""
    lines = invoke("tokenize", toy, "the é").stdout.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["259", "'the'"],
        ["32", "' '"],
        ["195", r"b'\xc3'"],
        ["169", r"b'\xa9'"],
    ]


def test_tokenize_json_and_special_tokens(toy, invoke):
    """Names of control tokens are those tokens unless --no-special; - reads stdin."""
    whole = json.loads(invoke("tokenize", toy, "<|im_end|>", "--json").stdout)
    assert whole == {
        "token_ids": [263],
        "num_tokens": 1,
        "tokens": [{"id": 263, "text": "<|im_end|>"}],
    }
    plain = json.loads(
        invoke("tokenize", toy, "-", "--json", "--no-special", input="<|im_end|>").stdout
    )
    assert plain["num_tokens"] > 1


def test_logits_are_the_models_at_every_position(toy, invoke, tmp_path):
    """Row i depends on the tokens up to i only, and chunks leave no seams; no partial file stays."""
    whole, prefix = tmp_path / "a.npy", tmp_path / "b.npy"
    ids = [str(i) for i in range(5, 45)]
    result = invoke("logits", toy, "--tokens", ",".join(ids), "--out", str(whole), *REFERENCE)
    assert result.exit_code == 0, result.stderr
    invoke(
        *("logits", toy, "--tokens", "-", "--out", str(prefix), "--prefill-chunk", "7", *REFERENCE),
        input=" ".join(ids[:20]),
    )
    rows, first = np.load(whole), np.load(prefix)
    assert rows.shape == (40, 264)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows[:20], first, rtol=1e-4, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "b.npy"]


@pytest.mark.parametrize(
    ("tokens", "out", "named"),
    [
        ("1,999", "x.npy", "999 is outside"),
        ("", "x.npy", "has no token ids"),
        ("1", "no/folder/x.npy", "no such folder"),
    ],
)
def test_logits_refuses_what_it_can_not_do(toy, invoke, tmp_path, tokens, out, named):
    """Errors leave no file behind, and an older file as it was."""
    (tmp_path / "x.npy").write_bytes(b"old")
    result = invoke("logits", toy, "--tokens", tokens, "--out", str(tmp_path / out), *REFERENCE)
    assert result.exit_code == 1
    assert named in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    assert (tmp_path / "x.npy").read_bytes() == b"old"


def test_bench_reports_medians_and_the_machine(toy, invoke):
    """Each repetition is measured, the warm-up is not, and the numbers carry where they are from."""
    result = invoke("bench", toy, "-p", "8", "-n", "4", "-r", "3", "--json", *REFERENCE)
    report = json.loads(result.stdout)
    for key in ("prefill_tok_s", "decode_tok_s"):
        speed = report[key]
        assert len(speed["values"]) == 3
        assert speed["min"] <= speed["median"] <= speed["max"]
        assert speed["min"] > 0
    assert report["num_prompt_tokens"] == 8
    assert report["machine"]["num_cores"] >= 1
    assert report["machine"]["versions"]["thermocline"]
    assert report["config"]["kernels"] == "reference"


@pytest.mark.slow
def test_bench_shortens_only_the_prompt_that_nobody_asked_for(small_toy, invoke):
    """A small context takes the default prompt's place; an explicit one that does not fit is refused."""
    result = invoke("bench", small_toy, "-n", "4", "-r", "1", "--json", *REFERENCE)
    assert json.loads(result.stdout)["num_prompt_tokens"] == 92
    result = invoke("bench", small_toy, "-p", "93", "-n", "4", *REFERENCE)
    assert result.exit_code == 1
    assert "lower -p or -n" in result.stderr


def test_bench_takes_0_as_llama_bench_does(toy, invoke):
    """A phase of 0 tokens is not measured; both, and an answer of one token, are refused."""
    alone = json.loads(
        invoke("bench", toy, "-p", "8", "-n", "0", "-r", "1", "--json", *REFERENCE).stdout
    )
    assert alone["prefill_tok_s"]["median"] > 0
    assert alone["decode_tok_s"] is None
    answer = json.loads(
        invoke("bench", toy, "-p", "0", "-n", "4", "-r", "1", "--json", *REFERENCE).stdout
    )
    assert answer["decode_tok_s"]["median"] > 0
    assert answer["prefill_tok_s"] is None
    for given, told in (
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-n", "1"), "-n 2 or more"),
    ):
        result = invoke("bench", toy, *given, *REFERENCE)
        assert result.exit_code == 2
        assert told in result.stderr


def test_bench_table_names_both_speeds(toy, invoke):
    """The page for people has prompt, answer and processor."""
    page = invoke("bench", toy, "-p", "8", "-n", "4", "-r", "1", *REFERENCE).stdout
    assert "prompt of 8 tokens" in page
    assert "answer of 4 tokens" in page
    assert "processor" in page


@pytest.mark.slow
def test_perplexity_of_a_text(toy, invoke, tmp_path):
    """The number comes with what it was taken over; stdin and a file say the same."""
    path = tmp_path / "text.txt"
    path.write_text("the inner than the " * 20)
    flags = ("--window", "32", *REFERENCE)
    result = json.loads(invoke("perplexity", toy, str(path), "--json", *flags).stdout)
    assert result["perplexity"] == pytest.approx(np.exp(result["nll_mean"]))
    assert result["window_tokens"] == 32
    assert 0 < result["num_scored_tokens"] < result["num_tokens"]
    page = invoke("perplexity", toy, "-", *flags, input=path.read_text()).stdout
    assert page.startswith(f"perplexity {result['perplexity']:.4f}\n")


@pytest.mark.parametrize(("content", "named"), [(None, "No such file"), (b"\xff", "not UTF-8")])
def test_perplexity_refuses_what_is_no_text(toy, invoke, tmp_path, content, named):
    """A missing or binary file is one plain error."""
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    result = invoke("perplexity", toy, str(path), *REFERENCE)
    assert result.exit_code == 1
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_bench_says_how_near_the_limits_are(toy, invoke):
    """Native kernels print a roofline per phase, in the table and in the JSON."""
    arguments = ("bench", toy, "-p", "8", "-n", "4", "-r", "1", "--threads", "1")
    report = json.loads(invoke(*arguments, "--json").stdout)
    assert [load["phase"] for load in report["roofline"]] == ["prefill", "decode"]
    assert all(load["memory"] > 0 and load["compute"] > 0 for load in report["roofline"])
    assert report["kernels"].endswith("x 1")
    page = invoke(*arguments).stdout
    assert "decode roofline" in page
