"""`thermocline top`: what a server does now, in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import note, show
from thermocline.cli.sources import SettingOption
from thermocline.errors import EngineError
from thermocline.server.core.settings import DEFAULT_HOST, DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.cli.live_events import LiveEvent

_RETRY_S = 1.0


@click.command()
@click.option(
    "--url",
    default=f"http://{DEFAULT_HOST}:{DEFAULT_PORT}",
    show_default=True,
    metavar="URL",
    help="Address that the server printed.",
)
@click.option(
    "--api-key",
    cls=SettingOption,
    metavar="KEY",
    help="The server's key, if it wants one; better set THERMOCLINE_API_KEY.",
)
@click.option("--once", is_flag=True, help="Print the present state and end.")
def top(url: str, api_key: str | None, once: bool) -> None:
    """Watch a server: its speed, lanes, requests and memory.

    \b
    Examples:
      thermocline top
      thermocline top --url http://127.0.0.1:7717 --once
      thermocline top | tee top.log         one line per event, where there is no screen

    A server that goes away is asked again until it is back.
    """
    if once:
        _print_once(url, api_key)
        return
    try:
        if sys.stdout.isatty():
            _watch(url, api_key)
        else:
            _print_lines(url, api_key)
    except KeyboardInterrupt:
        return  # Ctrl-C is the way to end it


def _print_once(url: str, api_key: str | None) -> None:
    from thermocline.cli.live_events import ReadyEvent, ServerAwayError, read_events
    from thermocline.cli.live_view import LiveScreen

    screen = LiveScreen(url)
    try:
        for event in read_events(url, api_key):
            screen.take(event)
            # Shares and speeds are differences: the first event has none.
            if not isinstance(event, ReadyEvent) or event.tokens.output_per_second is not None:
                show(screen)
                return
    except ServerAwayError as error:
        raise EngineError(
            f"no server answers at {url} ({error}): start one with `thermocline serve`, or give --url"
        ) from error
    raise EngineError(f"the server at {url} ended before it said anything: ask again")


def _watch(url: str, api_key: str | None) -> None:
    from rich.console import Console
    from rich.live import Live

    from thermocline.cli.live_view import LiveScreen

    screen = LiveScreen(url)
    console = Console(markup=False, highlight=False, emoji=False)
    # Redrawn on a timer, so that it follows the size of the window while the server is silent.
    with Live(screen, console=console, screen=True, refresh_per_second=4):
        for event in _events(url, api_key):
            if isinstance(event, str):
                screen.say_away(event)
            else:
                screen.take(event)


def _print_lines(url: str, api_key: str | None) -> None:
    from thermocline.cli.live_view import plain_line

    is_away = False
    for event in _events(url, api_key):
        if not isinstance(event, str):
            click.echo(plain_line(event))
        elif not is_away:
            note(f"no answer from {url} ({event}), trying again")
        is_away = isinstance(event, str)


def _events(url: str, api_key: str | None) -> Iterator[LiveEvent | str]:
    """Yield events without end, and a reason each time that the server does not answer."""
    from thermocline.cli.live_events import ServerAwayError, read_events

    while True:
        try:
            yield from read_events(url, api_key)
            why = "it ended"
        except ServerAwayError as error:
            why = str(error)
        yield why
        time.sleep(_RETRY_S)
