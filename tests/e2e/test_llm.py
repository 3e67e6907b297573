"""The API for scripts: answers in order, as many prompts as one likes, nothing left over."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.toy_model import write_toy_model
from thermocline import (
    LLM,
    ConfigError,
    Engine,
    EngineClosedError,
    ModelError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
)
from thermocline.demo import DEMO_MODEL_PATH

# The 10,000 are in `make prompts`.
NUM_PROMPTS = int(os.environ.get("THERMOCLINE_LLM_PROMPTS", "300"))
MAX_AHEAD = 256


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The path of a toy model with room for 512 tokens."""
    return write_toy_model(tmp_path_factory.mktemp("models") / "toy.gguf")


@pytest.fixture
def llm(toy):
    """A toy model, open."""
    with LLM(toy, kernels="native") as opened:
        yield opened


@pytest.mark.slow
def test_many_prompts_are_answered_in_order_with_flat_memory(llm):
    """More prompts than the engine accepts at a time: none is refused, each answer is its own, few are in memory."""
    numbers = range(NUM_PROMPTS)
    taken, memory = 0, []

    def prompts():
        nonlocal taken
        for number in numbers:
            taken = number
            yield f"number {number}"

    params = SamplingParams(max_tokens=3, ignore_eos=True)
    alone = {number: llm.generate(f"number {number}", params).token_ids for number in numbers[::97]}
    for number, answer in enumerate(llm.generate_each(prompts(), params)):
        assert taken - number <= MAX_AHEAD
        assert len(answer.token_ids) == 3
        assert alone.get(number, answer.token_ids) == answer.token_ids
        if number % 100 == 0:
            memory.append(psutil.Process().memory_info().rss)
    assert number == NUM_PROMPTS - 1
    # The caches of the engine are full after a few thousand.
    assert memory[-1] - memory[len(memory) // 2] < 32 << 20


def test_answers_are_those_of_the_engine(llm, toy):
    """The tokens, text and reason that the async API gives, also for token ids and for one prompt alone."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    async def events():
        async with Engine.open(toy) as engine:
            return [event async for event in engine.generate("hello", params)]

    told = asyncio.run(events())
    ids = llm.engine.tokenizer.encode("hello")
    for answer in (*llm.generate(["hello", ids], params), llm.generate("hello", params), llm.generate(ids, params)):  # fmt: skip
        assert answer.token_ids == tuple(token for event in told for token in event.token_ids)
        assert str(answer) == answer.text == "".join(event.text for event in told)
        assert answer.finish_reason == "length"
    assert llm.generate([]) == []


def test_keywords_are_fields_of_the_params(llm):
    """They change what `params` say; an unknown one is an error that names the nearest."""
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert len(llm.generate("hello", params, max_tokens=2).token_ids) == 2
    with pytest.raises(RequestError, match=r"'max_token'.*did you mean max_tokens"):
        llm.generate("hello", max_token=2)
    with pytest.raises(ConfigError, match="'hot_devise': did you mean hot_device"):
        LLM("nothing.gguf", hot_devise="cpu")


def test_a_bar_says_how_far_it_is(llm, capsys):
    """On stderr, and only if it is asked for; of a generator the end is not known."""
    for make, shown in ((lambda: ["a", "b"], "2/2"), (lambda: iter("ab"), "2/?")):
        llm.generate(make(), max_tokens=1, ignore_eos=True)
        assert capsys.readouterr().err == ""
        llm.generate(make(), max_tokens=1, ignore_eos=True, progress=True)
        assert shown in capsys.readouterr().err


def test_leaving_the_loop_ends_what_is_under_way(llm):
    """Whoever has seen enough goes away; the engine is idle then."""
    answers = llm.generate_each(map(str, range(80)), max_tokens=12, ignore_eos=True)
    next(answers)
    answers.close()
    assert asyncio.run(llm.engine.snapshot()).num_running == 0


def test_it_works_inside_of_a_running_loop(llm):
    """As in a notebook's cell."""

    async def cell():
        return llm.generate("hello", max_tokens=2, ignore_eos=True)

    assert len(asyncio.run(cell()).token_ids) == 2


def test_a_prompt_that_can_not_be_served_is_named(llm):
    """The error of one says which it was; the others are given up, and the model goes on."""
    with pytest.raises(PromptTooLongError) as caught:
        llm.generate(["a", "b", "c" * 5000, "d"], max_tokens=20, ignore_eos=True)
    assert caught.value.__notes__ == ["this is about prompt 2, counted from 0"]
    assert asyncio.run(llm.engine.snapshot()).num_running == 0
    assert len(llm.generate("hello", max_tokens=2, ignore_eos=True).token_ids) == 2


def test_an_interrupt_ends_what_is_under_way(llm):
    """Ctrl-C in a cell: no request is left, and the model still answers."""

    def prompts():
        yield from ("a", "b")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), max_tokens=400, ignore_eos=True)
    assert asyncio.run(llm.engine.snapshot()).num_running == 0
    assert len(llm.generate("hello", max_tokens=2, ignore_eos=True).token_ids) == 2


def test_closing_ends_the_calls_of_other_threads(toy):
    """They get an error instead of waiting for ever; a closed model says that it is."""
    llm = LLM(toy)
    begun, errors = threading.Event(), []

    def prompts():
        yield "a"
        begun.set()
        yield from map(str, range(500))

    def work() -> None:
        try:
            llm.generate(prompts(), max_tokens=300, ignore_eos=True)
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    llm.close()
    thread.join()
    assert len(errors) == 1
    with pytest.raises(EngineClosedError, match="make a new LLM"):
        llm.generate("a")
    llm.close()
    assert "ended" in repr(llm)


def test_a_file_that_can_not_be_opened_leaves_nothing(tmp_path):
    """The error is the engine's, and no thread is left (the suite checks that of each test)."""
    with pytest.raises(ModelError):
        LLM(tmp_path / "nothing.gguf")


@pytest.mark.slow
def test_chat_and_repr():
    """A conversation is a text, messages, or several of them; what is printed is useful."""
    with LLM(DEMO_MODEL_PATH, ctx=512) as llm:
        assert repr(llm) == (
            "LLM('demo-moe.gguf', Engine('thermocline demo', qwen3moe, context 512))"
        )
        question = "What is an expert?"
        one = llm.chat(question, max_tokens=20)
        messages = [{"role": "user", "content": question}]
        assert [one, one] == [_same(one, answer) for answer in llm.chat([messages, question], max_tokens=20)]  # fmt: skip
        assert repr(one).startswith("Answer('")
        assert "20 tokens" in repr(one)
        assert llm.embed(question).vectors.shape == (1, llm.engine.spec.hidden_size)


def _same(one, other):
    """Return the first if both say the same."""
    return one if (one.text, one.token_ids) == (other.text, other.token_ids) else other


@pytest.mark.slow
def test_a_script_that_does_not_close_ends_cleanly(toy):
    """Its last line is the end: exit code 0, nothing on stderr."""
    code = (
        f"from thermocline import LLM\nllm = LLM({os.fspath(toy)!r})\n"
        "print(len(llm.generate('a', max_tokens=3, ignore_eos=True).token_ids))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
