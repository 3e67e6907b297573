"""`thermocline run`: prompt forms, output forms, errors."""

from __future__ import annotations

import json

import pytest

from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.lanes import Lane

REFERENCE = ("--kernels", "reference")
SHORT = ("--ignore-eos", "--max-tokens", "6", *REFERENCE)


async def _generate(path, prompt, **params):
    async with Engine.open(path, EngineConfig(kernels="reference")) as engine:
        ids = await engine.encode(prompt) if isinstance(prompt, str) else prompt
        events = [event async for event in engine.generate(ids, SamplingParams(**params))]
        return (
            ids,
            [i for event in events for i in event.token_ids],
            "".join(e.text for e in events),
        )


async def test_text_is_what_the_engine_answers(toy, invoke):
    """stdout holds the answer and a line end, nothing else; stderr stays silent without a terminal."""
    _, _, text = await _generate(toy, "the inner", max_tokens=6, ignore_eos=True)
    result = await _in_thread(invoke, "run", toy, "-p", "the inner", *SHORT)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == text.removesuffix("\n") + "\n"
    assert result.stderr == ""


@pytest.mark.parametrize("command", [("run", "-p", "the inner"), ("chat",)], ids=str)
def test_explain_prints_each_choice_to_stderr(toy, invoke, command):
    """A line each, with its reason; the answer is the one without the flag."""
    name, *rest = command
    plain = invoke(name, toy, *rest, *SHORT, input="hello")
    flags = ("--explain", "--prompt-chunks", "3")
    told = invoke(name, toy, *rest, *flags, *SHORT, input="hello")
    assert told.exit_code == 0, told.stderr
    assert told.stdout == plain.stdout
    lines = told.stderr.splitlines()
    assert "kernels: reference (asked for (--kernels))" in lines
    assert "prompt chunks in flight: 3 (asked for (--prompt-chunks))" in lines
    assert any(line.startswith("prompt chunk: 1024 tokens (") for line in lines)


async def test_json_is_one_object_with_everything(toy, invoke):
    """--json prints exactly one object: text, ids, reason, timings, experts."""
    prompt_ids, ids, text = await _generate(toy, "the inner", max_tokens=6, ignore_eos=True)
    result = await _in_thread(invoke, "run", toy, "-p", "the inner", "--json", *SHORT)
    answer = json.loads(result.stdout)
    timings = answer.pop("timings")
    experts = answer.pop("experts")
    assert answer == {
        "text": text,
        "token_ids": ids,
        "prompt_token_ids": prompt_ids,
        "finish_reason": "length",
    }
    assert set(timings) == {
        *("queue_s", "prompt_s", "decode_s", "num_prompt_tokens", "num_output_tokens"),
        *("prompt_tokens_per_s", "decode_tokens_per_s", "num_cached_tokens", "drafts"),
    }
    assert (timings["num_prompt_tokens"], timings["num_output_tokens"]) == (len(prompt_ids), 6)
    assert experts["num_hot"] == 0
    assert experts["num_cold"] == 16
    assert experts["hot_share"] == 0
    assert experts["prefetch"]["total_hints"] > 0


def test_the_split_changes_no_token(toy, invoke):
    """Hot and cold experts together give the same tokens as cold ones alone, and say their share."""
    flags = ("--prompt-tokens", "5,6,7", "--json", *SHORT)
    cold = json.loads(invoke("run", toy, *flags).stdout)
    split = json.loads(invoke("run", toy, *flags, "--hot-device", "cpu").stdout)
    assert split["token_ids"] == cold["token_ids"]
    assert split["experts"]["num_hot"] == 8
    assert 0 < split["experts"]["hot_share"] < 1


def test_prompt_tokens_are_taken_as_they_are(toy, invoke):
    """Token ids come from the flag or from stdin."""
    given = json.loads(invoke("run", toy, "--prompt-tokens", "5,6,7", "--json", *SHORT).stdout)
    piped = json.loads(
        invoke("run", toy, "--prompt-tokens", "-", "--json", *SHORT, input="5 6\n7\n").stdout
    )
    assert given["prompt_token_ids"] == piped["prompt_token_ids"] == [5, 6, 7]
    assert given["token_ids"] == piped["token_ids"]


def test_a_prompt_from_stdin_loses_only_the_last_line_end(toy, invoke):
    """What `echo` puts at the end is not part of the prompt; everything before is."""
    ids = [
        json.loads(invoke("run", toy, "-p", form, "--json", *SHORT, input=text).stdout)[
            "prompt_token_ids"
        ]
        for form, text in (("a\n b", None), ("-", "a\n b\n"))
    ]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_chat_goes_through_the_template(toy, invoke):
    """--chat and --system become turns; names of control tokens in the message stay text."""
    flags = ("--json", *SHORT)
    plain = json.loads(invoke("run", toy, "--chat", "hi", *flags).stdout)["prompt_token_ids"]
    whole = json.loads(invoke("run", toy, "--chat", "hi", "--system", "s", *flags).stdout)
    forged = json.loads(invoke("run", toy, "--chat", "<|im_start|>", *flags).stdout)
    start = 262
    assert plain.count(start) == 2
    assert whole["prompt_token_ids"].count(start) == 3
    assert forged["prompt_token_ids"].count(start) == 2


def test_a_prompt_may_name_control_tokens(toy, invoke):
    """--prompt is taken as a whole prompt, control tokens included."""
    result = invoke("run", toy, "-p", "<|im_start|>a", "--json", *SHORT)
    assert json.loads(result.stdout)["prompt_token_ids"][0] == 262


def test_a_seed_repeats_a_random_answer(toy, invoke):
    """The same seed draws the same tokens."""
    flags = ("--temperature", "1.5", "--seed", "11", "--json", *SHORT)
    first, second = (
        json.loads(invoke("run", toy, "-p", "a", *flags).stdout)["token_ids"] for _ in range(2)
    )
    assert first == second


def test_the_trace_is_written_and_announced(toy, invoke, tmp_path):
    """--trace leaves a timeline with work on it, and stderr says where."""
    path = tmp_path / "t.json.gz"
    result = invoke("run", toy, "-p", "a", "--trace", str(path), *SHORT)
    assert result.exit_code == 0, result.stderr
    assert str(path) in result.stderr
    assert "perfetto" in result.stderr
    assert Lane.CPU in {event.lane for event in read_chrome(path).events if hasattr(event, "lane")}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("nowhere.gguf", "-p", "x"), "nowhere.gguf"),
        (("{toy}", "-p", "x", "--ctx", "99999"), "--ctx is 99999"),
        (("{toy}", "-p", ""), "prompt is empty"),
        (("{toy}", "--prompt-tokens", "1,264"), "264 is outside"),
        (("{toy}", "-p", "abcdefgh", "--ctx", "4"), "--ctx"),
        (("{toy}", "-p", "x", "--trace", "/no/such/folder/t.json"), "/no/such/folder"),
        (("{junk}", "-p", "x"), "not with b'GGUF'"),
    ],
)
def test_errors_are_one_plain_line(toy, invoke, tmp_path, args, named):
    """What a user can cause ends with one line on stderr and exit code 1."""
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"no model at all")
    result = invoke("run", *(arg.format(toy=toy, junk=junk) for arg in args))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr
    assert result.stdout == ""


def test_bytes_that_are_no_text_are_an_error(toy, invoke):
    """A prompt on stdin that is not UTF-8 is refused with the reason."""
    result = invoke("run", toy, "-p", "-", input=b"\xff\xfe")
    assert result.exit_code == 1
    assert "stdin is not UTF-8" in result.stderr


async def _in_thread(invoke, *args):
    """Run a command where no event loop runs yet."""
    import asyncio

    return await asyncio.to_thread(invoke, *args)


@pytest.mark.slow
def test_another_template(invoke, tmp_path):
    """--chat-template-file replaces the model's template; one that can not be used is one plain line."""
    path = tmp_path / "t.jinja"
    path.write_text("{{ raise_exception('not today') }}")
    flags = ("--chat", "hi", "-n", "1", "--chat-template-file", str(path))
    result = invoke("run", *flags)
    assert result.exit_code != 0
    assert "not today" in result.stderr
    path.write_text("{{ messages[0].content }}")
    assert invoke("run", *flags).exit_code == 0
    path.unlink()
    for command in ("run", "chat"):
        result = invoke(command, *(flags if command == "run" else flags[2:]), input="hi\n")
        assert result.exit_code != 0
        assert "no such file; check the path" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_schema_gives_json(toy, invoke, tmp_path):
    """From a file, from stdin or as it is; of a chat and of a text; an answer that was cut is told."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    text = json.dumps(schema)
    (tmp_path / "schema.json").write_text(text)
    flags = ("--json-schema", str(tmp_path / "schema.json"), *REFERENCE, "-n", "200")
    seeds = ("--temperature", "1", "--seed", "1")
    for prompt in (("-p", "the"), ("--chat", "the")):
        result = invoke("run", toy, *prompt, *flags, *seeds)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["n"] in (1, 2, 3)
    for given in (("-j", text), ("-jf", "-")):
        result = invoke("run", toy, "-p", "the", *given, *REFERENCE, "-n", "200", input=text)
        assert json.loads(result.stdout)["n"] in (1, 2, 3)
    cut = invoke("run", toy, "-p", "the", *flags, "-n", "2")
    assert (cut.exit_code, "is no whole JSON" in cut.stderr) == (0, True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{no", "is not JSON"),
        ("none.json", "none.json"),
        ('{"type": 3}', "--json-schema can not be enforced"),
    ],
)
def test_a_schema_of_no_use_is_an_error(toy, invoke, given, says):
    """It names the flag or the file."""
    result = invoke("run", toy, "-p", "the", "-j", given, *REFERENCE)
    assert result.exit_code == 1
    assert says in result.stderr
