"""The chat in a real terminal: prompts, Ctrl-C during an answer and at the prompt, lines and their history."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress

import pytest


class Terminal:
    """A command that believes to talk to a person."""

    def __init__(self, *args: str, **variables: str) -> None:
        self._side, other = pty.openpty()
        environment = os.environ | {
            "TERM": "xterm",
            "COLUMNS": "80",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **variables,
        }
        # Started by a small program that makes the terminal its own, so that Ctrl-C reaches it.
        code = (
            "import fcntl, runpy, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "
            "runpy.run_module('thermocline', run_name='__main__')"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        """Press the keys of `text`."""
        os.write(self._side, text.encode())

    def wait_for(self, text: str) -> str:
        """Return the output up to `text`, which must come within a minute."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            ready, _, _ = select.select([self._side], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; seen: {self.seen!r}"
            self.seen += os.read(self._side, 4096).decode("utf-8", "replace")
        before, self.seen = self.seen.split(text, 1)
        return before

    def shows_within(self, text: str, seconds: float) -> bool:
        """Return whether `text` comes so soon; what is up to it is taken."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = max(0, deadline - time.monotonic())
            if not select.select([self._side], [], [], left)[0]:
                return False
            self.seen += os.read(self._side, 4096).decode("utf-8", "replace")
        self.seen = self.seen.split(text, 1)[1]
        return True

    def take_back(self) -> None:
        """Press Ctrl-C until what was typed is taken back, and the prompt is there.

        Python's readline notices a signal that comes before it waits with the next one only, both as one.
        """
        for _ in range(12):
            self.type("\x03")
            if self.shows_within("> ", 5):
                return
        raise AssertionError(f"the line was not taken back; seen: {self.seen!r}")

    def leave_by(self, keys: str) -> int:
        """Press `keys` until the command ends, and return its exit code.

        Python's readline does not notice a signal that comes between its prompt and its waiting. A second signal while
        Python shuts down would end the process with another code.
        """
        for _ in range(12):
            self.type(keys)
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(5)
        raise AssertionError(f"the command did not end; seen: {self.seen!r}")

    def exit_code(self) -> int:
        """Return the exit code, which must come within a minute."""
        return self._process.wait(60)

    def close(self) -> None:
        """End the command, whatever it does."""
        self._process.kill()
        self._process.wait()
        os.close(self._side)


@pytest.fixture
def terminal():
    """Open terminals; closed after the test."""
    opened: list[Terminal] = []

    def start(*args: str, **variables: str) -> Terminal:
        opened.append(Terminal(*args, **variables))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.slow
def test_an_interrupt_stops_the_answer_and_then_the_chat(terminal, toy):
    """Ctrl-C during an answer goes back to the prompt; at the prompt it leaves with 130."""
    chat = terminal("chat", toy, "--ignore-eos", "--kernels", "reference")
    chat.wait_for("> ")
    chat.type("hello\n")
    chat.wait_for("reading the prompt")
    chat.wait_for("\ufffd")  # the toy's answers consist of such characters for the most part
    chat.type("\x03")
    chat.wait_for("[stopped]")
    chat.wait_for("> ")
    chat.type("/help\n")
    chat.wait_for("/reset")
    chat.wait_for("> ")
    assert chat.leave_by("\x03") == 130
    assert "Traceback" not in chat.seen


@pytest.mark.slow
def test_the_end_of_input_leaves_the_chat(terminal, toy):
    """Ctrl-D at the prompt is a normal end."""
    chat = terminal("chat", toy, "--kernels", "reference")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0


@pytest.mark.slow
def test_an_answer_in_a_terminal_tells_its_speed(terminal, toy):
    """Behind the answer stand the speeds; the timeline is announced."""
    run = terminal("run", toy, "-p", "the", "-n", "4", "--kernels", "reference")
    run.wait_for("opening toy.gguf")
    run.wait_for("first token after ")
    run.wait_for("prompt tokens at")
    assert run.exit_code() == 0


FLAGS = ("--kernels", "reference", "--max-tokens", "2", "--ignore-eos")
UP = "\x1b[A"


def saved_turns(chat, path) -> list[str]:
    """Let a chat save its conversation, and return what the user said."""
    chat.type(f"/save {path}\n")
    chat.wait_for("[saved:")
    chat.wait_for("> ")
    messages = json.loads(path.read_text())["messages"]
    return [each["content"] for each in messages if each["role"] == "user"]


def say(chat, *keys: str) -> None:
    """Type a message, and wait until it is answered."""
    for each in keys:
        chat.type(each)
    chat.wait_for("prompt tokens at")
    chat.wait_for("> ")


@pytest.mark.slow
def test_messages_of_several_lines_and_lines_taken_back(terminal, toy, tmp_path):
    """Three quotes and a backslash join lines, a paste is one message, and Ctrl-C clears what was typed."""
    chat = terminal("chat", toy, *FLAGS)
    chat.wait_for("> ")
    say(chat, '"""one\n', "two\n", 'three"""\n')
    say(chat, "four\\\n", "five\n")
    chat.type("not this")
    chat.wait_for("not this")
    chat.take_back()
    chat.type("nor\\\n")
    chat.wait_for(". ")
    chat.take_back()
    say(chat, "\x1b[200~six\nseven\x1b[201~", "\n")
    assert saved_turns(chat, tmp_path / "chat.json") == [
        "one\ntwo\nthree",
        "four\nfive",
        "six\nseven",
    ]
    chat.type("\x04")
    assert chat.exit_code() == 0


@pytest.mark.slow
def test_what_was_typed_is_there_in_the_next_chat(terminal, toy, tmp_path):
    """Arrow up brings the last chat's message back, from a file for this user alone; --no-history writes none."""
    state = {"XDG_STATE_HOME": os.fspath(tmp_path)}
    chat = terminal("chat", toy, *FLAGS, "--no-history", **state)
    chat.wait_for("> ")
    chat.type("/tokens\n")
    chat.wait_for("0 tokens")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0
    assert list(tmp_path.iterdir()) == []
    chat = terminal("chat", toy, *FLAGS, **state)
    chat.wait_for("> ")
    say(chat, '"""before\n', '"""\n')
    chat.type("\x04")
    assert chat.exit_code() == 0
    (file,) = (tmp_path / "thermocline").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    chat = terminal("chat", toy, *FLAGS, **state)
    chat.wait_for("> ")
    say(chat, UP, " and again", "\n")
    assert saved_turns(chat, tmp_path / "chat.json") == ["before and again"]


@pytest.mark.slow
def test_an_unknown_file_does_not_end_a_chat(terminal, toy, tmp_path):
    """At a terminal an error is told, and the next message can be typed."""
    chat = terminal("chat", toy, *FLAGS)
    chat.wait_for("> ")
    chat.type(f"/load {tmp_path / 'none.json'}\n")
    chat.wait_for("none.json: No such file")
    chat.wait_for("> ")
    chat.type("/retry\n")
    chat.wait_for("nothing to retry")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0
