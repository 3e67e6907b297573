"""The chat in a real terminal: prompts, Ctrl-C during an answer, Ctrl-C at the prompt."""

from __future__ import annotations

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

    def __init__(self, *args: str) -> None:
        self._side, other = pty.openpty()
        environment = os.environ | {
            "TERM": "xterm",
            "COLUMNS": "80",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
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

    def leave_by(self, keys: str) -> int:
        """Press `keys` until the command ends, and return its exit code.

        Python's readline does not notice a signal that comes between its prompt and its waiting.
        """
        for _ in range(60):
            self.type(keys)
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(1)
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

    def start(*args: str) -> Terminal:
        opened.append(Terminal(*args))
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
