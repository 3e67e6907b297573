"""`thermocline chat`: turns, commands, and a context that fills up."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import THINKING_TEMPLATE
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.cli.chat import ChatSession
from thermocline.errors import PromptTooLongError, RequestError

FLAGS = ("--kernels", "reference", "--max-tokens", "3", "--ignore-eos")


@pytest.fixture
async def engine(small_toy):
    """An engine with a context of 96 tokens."""
    async with Engine.open(small_toy, EngineConfig(kernels="reference")) as opened:
        yield opened


def _conversation(engine, system=None):
    return ChatSession(engine, SamplingParams(max_tokens=3, ignore_eos=True), system)


@pytest.mark.slow
def test_each_line_of_a_pipe_is_a_turn(toy, invoke):
    """A conversation over a pipe is the same as asking twice: history goes along, no prompts appear."""
    both = invoke("chat", toy, *FLAGS, input="the\nin\n")
    first = invoke("chat", toy, *FLAGS, input="the\n")
    second = invoke("chat", toy, *FLAGS, input="in\n")
    assert both.exit_code == first.exit_code == 0, both.stderr
    assert both.stdout.startswith(first.stdout)
    assert both.stdout != first.stdout + second.stdout, "the second turn did not see the first"
    assert both.stderr == ""


@pytest.mark.slow
def test_reset_forgets_and_exit_leaves(toy, invoke):
    """After /reset an answer is as in a new conversation; nothing is read behind /exit."""
    alone = invoke("chat", toy, *FLAGS, input="in\n")
    result = invoke("chat", toy, *FLAGS, input="the\n/reset\nin\n/exit\nmore\n")
    first = invoke("chat", toy, *FLAGS, input="the\n")
    assert result.stdout == first.stdout + alone.stdout


def test_help_and_unknown_commands_are_answered_on_stderr(toy, invoke):
    """Commands of the chat are no turns, and stdout carries answers only."""
    result = invoke("chat", toy, *FLAGS, input="/help\n\n/nonsense\n")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "/reset" in result.stderr
    assert "no command /nonsense" in result.stderr


def test_a_turn_that_can_not_be_answered_ends_a_pipe(small_toy, invoke):
    """A message that exceeds the context is an error with exit code 1."""
    result = invoke("chat", small_toy, *FLAGS, input="x" * 200 + "\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the prompt has")


@pytest.mark.slow
async def test_the_oldest_turns_are_dropped_when_the_context_is_full(engine, capsys):
    """A long conversation goes on: whole old turns go, the system message stays, and it is said."""
    conversation = _conversation(engine, system="s")
    for index in range(6):
        await conversation.take_turn(f"turn {index}")
    notes = capsys.readouterr().err
    assert "the context is full: the oldest turn was dropped" in notes
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert conversation.messages[-2]["content"] == "turn 5"
    assert conversation.messages[0]["content"] != "turn 0"


async def test_a_refused_turn_leaves_the_conversation_as_it_was(engine):
    """After a message that is too long, the next one continues the old conversation."""
    conversation = _conversation(engine)
    await conversation.take_turn("a")
    before = list(conversation.messages)
    with pytest.raises(PromptTooLongError):
        await conversation.take_turn("x" * 200)
    assert conversation.messages == before


@pytest.mark.slow
async def test_a_turn_that_fails_is_forgotten(engine):
    """An answer that could not be made leaves no empty turn that every later prompt would carry."""
    params = SamplingParams(max_tokens=3, logit_bias={10**6: 1.0})
    conversation = ChatSession(engine, params, None)
    with pytest.raises(RequestError, match="logit_bias"):
        await conversation.take_turn("the")
    assert conversation.messages == []


async def test_a_message_that_nearly_fills_the_context_is_still_answered(engine):
    """The room that is kept for an answer never refuses what fits; the cut answer is announced."""
    conversation = ChatSession(engine, SamplingParams(ignore_eos=True), None)
    await conversation.take_turn("x" * 60)
    assert len(conversation.messages) == 2


@pytest.mark.slow
async def test_an_answer_that_fills_the_context_is_announced(engine, capsys):
    """When the context cuts an answer, the user is told."""
    conversation = ChatSession(engine, SamplingParams(ignore_eos=True), None)
    await conversation.take_turn("x")
    assert "the answer was cut" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_change_what_comes_next(toy, invoke):
    """/system and /set do what the flags do, and /retry asks the last question again."""
    flags = ("--kernels", "reference", "--ignore-eos")
    told = invoke(
        "chat", toy, *flags, "-n", "9", input="/system s\n/set max-tokens 3\nthe\n/retry\n"
    )
    assert told.exit_code == 0, told.stderr
    meant = invoke("chat", toy, *flags, "-n", "3", "--system", "s", input="the\n")
    assert told.stdout == 2 * meant.stdout
    assert "max_tokens = 3" in told.stderr


@pytest.mark.slow
def test_a_saved_conversation_goes_on(toy, invoke, tmp_path):
    """After /load a chat answers as it would have; the file is for its owner alone."""
    path = tmp_path / "chat.json"
    whole = invoke("chat", toy, *FLAGS, "--system", "s", input="the\nin\n")
    first = invoke("chat", toy, *FLAGS, "--system", "s", input=f"the\n/save {path}\n")
    second = invoke("chat", toy, *FLAGS, input=f"/load {path}\nin\n")
    assert first.stdout + second.stdout == whole.stdout
    assert path.stat().st_mode & 0o777 == 0o600
    roles = [message["role"] for message in json.loads(path.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no", "it is not JSON"),
        ("{}", "no list of messages"),
        ('[{"role": "user", "content": [1]}]', "message 0 has no text"),
        ('[{"role": "tool", "content": "x"}]', "message 0 is of 'tool'"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(toy, invoke, tmp_path, text, says):
    """It is neither loaded nor overwritten."""
    path = tmp_path / "other.json"
    path.write_text(text)
    loaded = invoke("chat", toy, *FLAGS, input=f"/load {path}\n")
    assert loaded.exit_code == 1
    assert says in loaded.stderr
    saved = invoke("chat", toy, *FLAGS, input=f"/save {path}\n")
    assert saved.exit_code == 1
    assert "choose another name" in saved.stderr
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("/set temperature hot", "not a valid float"),
        ("/set temperature 9", "temperature is 9.0"),
        ("/set temprature 1", "temperature"),
        ("/set think on", "no switch for reasoning"),
        ("/set think maybe", "on, off or default"),
        ("/save", "needs the name of a file"),
        ("/retry", "nothing to retry"),
    ],
)
def test_what_a_command_can_not_do_is_said(toy, invoke, typed, says):
    """Over a pipe it ends the chat with an error that says the fix."""
    result = invoke("chat", toy, *FLAGS, input=f"{typed}\n")
    assert result.exit_code == 1
    assert says in result.stderr


def test_settings_are_listed_and_restored(toy, invoke):
    """/set alone tells all of them; default gives a flag's default back."""
    result = invoke("chat", toy, *FLAGS, input="/set top_k 7\n/set\n/set top_k default\n/tokens\n")
    assert result.exit_code == 0, result.stderr
    for line in ("top_k = 7", "max_tokens = 3", "think = default", "top_k = 0"):
        assert line in result.stderr.splitlines()
    assert "0 tokens" in result.stderr


@pytest.mark.slow
async def test_reasoning_is_switched_and_kept_apart(tmp_path):
    """--no-think renders the template without reasoning; what was thought is no part of what was said."""
    metadata = {"tokenizer.chat_template": THINKING_TEMPLATE}
    path = write_toy_model(tmp_path / "thinks.gguf", ToyShape(), metadata=metadata)
    async with Engine.open(path, EngineConfig(kernels="reference")) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        silent = ChatSession(engine, params, None, thinks=False)
        await silent.take_turn("the")
        assert silent.variables["enable_thinking"] is False
        thinking = ChatSession(engine, params, None, thinks=True)
        await thinking.take_turn("the")
        assert thinking.variables["enable_thinking"] is True
        assert silent.messages[1]["content"]
        assert thinking.messages[1]["content"] == ""
        assert thinking.messages[1]["reasoning_content"]
