"""The README's commands: every line is one that the command line takes.

Not run here are the lines that name models of the public hub (`pull`, `-hf`, `rm`): they need the outside network and
gigabytes. What they do is run in test_hub.py against a hub on this machine. Lines that serve until Ctrl-C, or wait for a
server or a keyboard (`serve`, `top`, `chat`), have tests of their own.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from thermocline.cli import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    (thermocline .*)$", README, re.MULTILINE)
NEEDS_THE_HUB = [line for line in COMMANDS if re.search(r" (pull|rm|-hf) ", line)]


def parse(group: click.Group, words: list[str]) -> click.Context:
    """Return the context of a command that is parsed and not run. Raises UsageError."""
    name, *rest = words
    command = group.commands[name]
    if isinstance(command, click.Group):
        return parse(command, rest)
    return command.make_context(name, rest)


def test_there_are_commands():
    """The two lists are not empty, so that the tests below see something."""
    assert len(COMMANDS) > 15
    assert len(NEEDS_THE_HUB) >= 5


@pytest.mark.parametrize("line", COMMANDS)
def test_every_line_is_a_command(line):
    """Each has a command, flags and arguments that there are."""
    program, *words = shlex.split(line, comments=True)
    assert program == "thermocline"
    with parse(cli, words) as context:
        assert context.command.callback is not None
