"""`thermocline run --batch`: answers as the server's, each once, also after a run that was killed."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

FLAGS = ("--kernels", "reference")
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
KINDS = {CHAT: ChatCompletion, TEXT: Completion, EMBED: CreateEmbeddingResponse}


def line(custom_id: str, url: str = TEXT, **body: object) -> str:
    """Return one request as OpenAI's batches have it."""
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(request) + "\n"


@pytest.fixture
def files(tmp_path):
    """The two files, and the flags that name them."""
    requests, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    return requests, answers, ("--batch", str(requests), "--out", str(answers))


def answers_in(path) -> dict[str, dict]:
    """Return the answers by id, each of which must be there once."""
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.slow
def test_every_request_gets_its_answer(toy, invoke, files):
    """Of each kind, as OpenAI's own types take it; a request that is wrong gets its error, and the others go on."""
    requests, answers, flags = files
    hello = [{"role": "user", "content": "hello"}]
    requests.write_text(
        line("chat", CHAT, model="gpt-4o-mini", messages=hello, max_tokens=3)
        + "\n"
        + line("text", TEXT, prompt="the", max_tokens=3, ignore_eos=True)
        + line("vector", EMBED, input="the")
        + line("wrong", CHAT, messages=hello, max_tokens=-4)
    )
    result = invoke("run", toy, *FLAGS, *flags)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "4 requests answered, 1 of them with an error" in result.stderr
    found = answers_in(answers)
    assert set(found) == {"chat", "text", "vector", "wrong"}
    for name, url in (("chat", CHAT), ("text", TEXT), ("vector", EMBED)):
        response = found[name]["response"]
        assert (response["status_code"], found[name]["error"]) == (200, None)
        assert response["request_id"].startswith("req_")
        KINDS[url].model_validate(response["body"], strict=True)
    wrong = found["wrong"]["response"]
    assert (wrong["status_code"], wrong["body"]["error"]["param"]) == (400, "max_tokens")
    alone = invoke("run", toy, *FLAGS, "-p", "the", "-n", "3", "--ignore-eos")
    assert found["text"]["response"]["body"]["choices"][0]["text"] == alone.stdout.removesuffix(
        "\n"
    )


@pytest.mark.slow
def test_a_killed_batch_goes_on_where_it_was(toy, invoke, start, files):
    """What was answered stays to the byte, a line that was cut is asked again, and all have what they would have had."""
    requests, answers, flags = files
    requests.write_text(
        "".join(
            line(f"r{n}", TEXT, prompt=f"word {n}", max_tokens=4 if n < 8 else 99, ignore_eos=True)
            for n in range(24)
        )
    )
    process = start("run", toy, *FLAGS, *flags)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        answers.exists() and answers.read_bytes().count(b"\n") > 2
    ):
        with suppress(Exception):
            process.wait(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    kept = answers.read_bytes()
    assert 2 < kept.count(b"\n") < 24
    whole = kept[: kept.rfind(b"\n") + 1]
    answers.write_bytes(whole + b'{"id":"batch_req_0123","custom_id":"r23","resp')
    result = invoke("run", toy, *FLAGS, *flags)
    assert result.exit_code == 0, result.stderr
    num_kept = whole.count(b"\n")
    assert f"{num_kept} were answered before" in result.stderr
    assert answers.read_bytes().startswith(whole)
    found = answers_in(answers)
    assert len(found) == 24
    (fresh := answers.with_name("fresh.jsonl")).touch()
    invoke("run", toy, *FLAGS, "--batch", str(requests), "--out", str(fresh))

    def texts(answered):
        return {
            name: each["response"]["body"]["choices"][0]["text"] for name, each in answered.items()
        }

    assert texts(found) == texts(answers_in(fresh))
    before = answers.read_bytes()
    again = invoke("run", "no-such-model.gguf", *FLAGS, *flags, "--quiet")
    assert (again.exit_code, again.stderr) == (0, ""), "a finished batch needs no model"
    assert answers.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ("{}\n", "line 1: Object missing required field"),
        (line("a") + "no\n", "line 2: "),
        (line("a") + line("b") + line("a"), "'a' in the lines 1 and 3"),
        (line("a", "/v1/files"), "line 1: Invalid enum value '/v1/files'"),
        (line("a", stream=True), "a batch has no streams"),
        (line(""), "custom_id must have 1 to 512 characters"),
    ],
)
def test_requests_of_no_use_are_refused_before_the_model_is_opened(invoke, files, text, says):
    """The error names the line, and no file is made."""
    requests, answers, flags = files
    requests.write_text(text)
    result = invoke("run", "no-such-model.gguf", *flags)
    assert result.exit_code == 1
    assert says in result.stderr
    assert not answers.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a letter", "is no answer of a batch"),
        ('{"x": 1}\n', "is no answer of a batch"),
        ('{"id":"batch_req_1","custom_id":"z","response":null}\n', "not in this batch"),
    ],
)
def test_a_file_that_is_not_this_batchs_is_left_alone(invoke, files, text, says):
    """Whatever --out names by mistake keeps its content."""
    requests, answers, flags = files
    requests.write_text(line("a"))
    answers.write_text(text)
    result = invoke("run", "no-such-model.gguf", *flags)
    assert result.exit_code == 1
    assert says in result.stderr
    assert answers.read_text() == text


def test_flags_that_a_batch_does_not_have(invoke, files):
    """They are refused, and not ignored."""
    requests, _, flags = files
    requests.write_text(line("a"))
    for more, says in (
        (("--temperature", "1"), "each request says it"),
        (("--json",), "leave them out"),
        (("--chat", "hi"), "--batch has the prompts"),
    ):
        result = invoke("run", *flags, *more)
        assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    assert invoke("run", "--batch", str(requests)).exit_code == 2
    same = invoke("run", "--batch", str(requests), "--out", str(requests))
    assert (same.exit_code, "the same file" in same.stderr) == (1, True)
