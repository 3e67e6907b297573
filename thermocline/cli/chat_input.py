"""What a person types into a chat: lines with editing and history, messages of several lines. Knows no chat."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from thermocline.cli.console import note

if TYPE_CHECKING:
    from thermocline.cli.line_history import LineHistory

_PROMPT: Final = "> "
_MORE: Final = ". "
_QUOTES: Final = '"""'


class ChatInput:
    """Reads messages: from a terminal as they are typed, otherwise a line each."""

    def __init__(self, history: LineHistory | None) -> None:
        """history: where messages of a terminal are kept; None for nowhere."""
        self._is_typed = sys.stdin.isatty()
        self._history = history if self._is_typed else None
        self._readline = _readline() if self._is_typed else None
        self._load()

    def read(self) -> str | None:
        """Return the next message, None at the end.

        At a terminal: a line that ends with a backslash goes on in the next one, and so do all between two lines with
        three quotes. Ctrl-C takes back what was typed so far; KeyboardInterrupt is raised where that is nothing.
        """
        if not self._is_typed:
            return sys.stdin.readline() or None
        while True:
            lines: list[str] = []
            try:
                message = self._typed(lines)
            except KeyboardInterrupt:
                if not lines and not self._has_begun():
                    raise
                click.echo(err=True)
                continue
            except EOFError:
                click.echo(err=True)
                return None
            self._keep(message)
            return message

    def _typed(self, lines: list[str]) -> str:
        """Return a message, of which `lines` has the first ones. Raises EOFError at the end of the input."""
        line = self._line(_PROMPT)
        if line.lstrip().startswith(_QUOTES):
            line = line.lstrip().removeprefix(_QUOTES)
            while not line.rstrip().endswith(_QUOTES):
                lines.append(line)
                line = self._line(_MORE)
            lines.append(line.rstrip().removesuffix(_QUOTES))
            return "\n".join(lines).strip("\n")
        while line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            line = self._line(_MORE)
        return "\n".join((*lines, line))

    def _line(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        click.echo(prompt, nl=False, err=True)
        return input()

    def _has_begun(self) -> bool:
        return self._readline is not None and bool(self._readline.get_line_buffer().strip())

    def _load(self) -> None:
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        if self._history is None:
            return
        try:
            messages = self._history.load()
        except OSError as error:
            self._do_without(error)
            return
        for message in messages:
            self._readline.add_history(message)

    def _keep(self, message: str) -> None:
        if not message.strip():
            return
        if self._readline is not None:
            self._readline.add_history(message)
        if self._history is not None:
            try:
                self._history.append(message)
            except OSError as error:
                self._do_without(error)

    def _do_without(self, error: OSError) -> None:
        path = "" if self._history is None else self._history.path
        note(
            f"[what you type is not kept: {path}: {error.strerror}; --no-history says no more of it]"
        )
        self._history = None


def _readline() -> Any:  # noqa: ANN401 - a module, which Python may have been built without
    try:
        import readline
    except ImportError:
        return None
    return readline
