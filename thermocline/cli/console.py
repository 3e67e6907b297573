"""What goes to the screen: answers and JSON to stdout; progress, notes and hints to stderr.

Owns the rules of what a terminal may be shown. Knows no engine.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Self

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import RenderableType
    from rich.status import Status

_QUIET = f"{__name__}.quiet"
# Text that a model or a file made could otherwise move the cursor, or worse.
_CONTROL_CODES = (*range(9), *range(11, 32), *range(127, 160))
_VISIBLE_CONTROLS = dict.fromkeys(_CONTROL_CODES, "\N{REPLACEMENT CHARACTER}") | {ord("\r"): ""}


def one_line(text: str) -> str:
    """Return `text` with line ends as spaces and other unprintable characters as escapes."""
    joined = " ".join(text.split("\n"))
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode()
        for char in joined
    )


def without_controls(text: str) -> str:
    """Return `text` with control characters made visible; tab and line feed stay, return goes."""
    return text.translate(_VISIBLE_CONTROLS)


def echo_json(value: object) -> None:
    """Print exactly one JSON object to stdout, in ASCII, which every pipe can carry."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def note(text: str) -> None:
    """Print a line to stderr that the user should see in any case."""
    click.echo(one_line(text), err=True)


def hint(text: str) -> None:
    """Print a line to stderr, if somebody watches it, and did not ask for silence."""
    if _is_watched():
        note(text)


def remark(text: str) -> None:
    """Print a line to stderr, unless the user asked for silence."""
    if not _is_quiet():
        note(text)


def silence(context: click.Context, _: click.Parameter, is_quiet: bool) -> bool:
    """Show no hints and no progress while this command runs: the callback of --quiet."""
    if is_quiet:
        context.meta[_QUIET] = True
    return is_quiet


def say(text: str) -> None:
    """Print a line to stdout, unless the user asked for silence."""
    if not _is_quiet():
        click.echo(text)


def _is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def _is_watched() -> bool:
    return sys.stderr.isatty() and not _is_quiet()


def show(*renderables: RenderableType) -> None:
    """Print tables and text to stdout; no markup is interpreted, since names come out of files."""
    from rich.console import Console

    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    # Captured, because rich would end the process by itself when the reader has left.
    with console.capture() as page:
        for renderable in renderables:
            console.print(renderable)
    click.echo(page.get(), nl=False)


class AnswerWriter:
    """Streams an answer to stdout and ends it with a line end; a complete, empty one is an empty line.

    Use it as a context.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if (self._last or kind is None) and not self._last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def write(self, text: str) -> None:
        """Print `text` at once."""
        if not text:
            return
        sys.stdout.write(without_controls(text) if self._is_terminal else text)
        sys.stdout.flush()
        self._last = text


class _Changing:
    """A text that is asked for whenever it is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __rich__(self) -> str:
        return one_line(self._text())


class MarkdownWriter(AnswerWriter):
    """Streams a chat's answer to a terminal: Markdown with styles, reasoning dim and as it is."""

    def __init__(self) -> None:
        from rich.console import Console

        from thermocline.cli.terminal_markdown import TerminalMarkdown

        super().__init__()
        self._markdown = TerminalMarkdown(Console(file=sys.stdout).width)
        self._is_thinking = False

    def __exit__(self, *failure: Any) -> None:  # noqa: ANN401 - handed on
        self._print(self._markdown.finish())
        super().__exit__(*failure)

    def write(self, text: str) -> None:
        """Print what of the answer can be shown now."""
        if not text:
            return
        if self._is_thinking:
            self._print("\n\n")
            self._is_thinking = False
        self._print(self._markdown.push(without_controls(text)))

    def think(self, text: str) -> None:
        """Print reasoning at once."""
        self._is_thinking = True
        self._print(f"\x1b[2m{without_controls(text)}\x1b[0m")

    def _print(self, styled: str) -> None:
        if styled:
            sys.stdout.write(styled)
            sys.stdout.flush()
            self._last = "\n" if styled.endswith("\n") else styled


def renders_markdown() -> bool:
    """Whether stdout is a terminal that knows styles."""
    if not sys.stdout.isatty():
        return False
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console.is_terminal and not console.is_dumb_terminal


class Progress:
    """One line on stderr that says what is being waited for; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Show `text` in place of what was shown."""
        if not _is_watched():
            return
        if self._status is not None:
            self._status.update(one_line(text))
            return
        from rich.console import Console

        console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._status = console.status(one_line(text))
        self._status.start()

    def follow(self, text: Callable[[], str]) -> None:
        """Show what `text` returns, anew several times a second, until something else is said.

        It is called on another thread.
        """
        self.say(text())
        if self._status is not None:
            self._status.update(_Changing(text))

    def clear(self) -> None:
        """Take the line away; more calls do nothing."""
        if self._status is not None:
            self._status.stop()
            self._status = None
