"""The views of `thermocline top`: a screen, or lines where there is none. Knows no network."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, assert_never

from rich.console import Group
from rich.table import Table
from rich.text import Text

from thermocline.cli.console import one_line
from thermocline.cli.live_events import (
    FailedEvent,
    IdleEvent,
    LoadingEvent,
    ReadyEvent,
    StoppedEvent,
)
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from thermocline.cli.live_events import Drafts, ExpertReads, LiveEvent, Worker

_SPARKS: Final = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS: Final = "_.-=+*#@"
_MAX_SPEEDS: Final = 400
_MAX_BAR: Final = 44
_MAX_REQUESTS: Final = 12
# Columns left of bars and curves.
_LABELS_WIDTH: Final = 24
_STATES: Final = {"waiting": "waiting", "prefill": "reading", "decode": "writing"}


class LiveScreen:
    """A screen of the newest event and of earlier speeds, for rich to print at any width."""

    def __init__(self, url: str) -> None:
        self._url = one_line(url)
        self._event: LiveEvent | None = None
        self._away: str | None = None
        self._speeds: deque[float] = deque(maxlen=_MAX_SPEEDS)

    def take(self, event: LiveEvent) -> None:
        """Show this event from now on."""
        self._event, self._away = event, None
        if isinstance(event, ReadyEvent):
            self._speeds.append(event.tokens.output_per_second or 0.0)

    def say_away(self, why: str) -> None:
        """Show that the server is away, and keep the last event."""
        self._away = one_line(why)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the screen's parts for the present width."""
        yield self._head()
        event = self._event
        if not isinstance(event, ReadyEvent):
            return
        is_ascii = options.ascii_only
        width = max(options.max_width - _LABELS_WIDTH, 4)
        bar = min(width, _MAX_BAR)
        parts: list[RenderableType] = [
            _speed_rows(event, list(self._speeds)[-width:], is_ascii=is_ascii),
            _lane_rows(event, bar, is_ascii=is_ascii),
            _fact_rows(event),
        ]
        if event.requests:
            parts.append(_request_rows(event, bar // 2, is_ascii=is_ascii))
        for part in parts:
            yield Text()
            yield part

    def _head(self) -> Text:
        event = self._event
        head = Text.assemble(("thermocline", "bold"), "  ")
        if event is not None:
            head.append(one_line(event.model), "bold cyan").append("  ")
        if self._away is not None:
            return head.append(f"no answer from {self._url} ({self._away}), trying again", "yellow")
        if event is None:
            return head.append(f"asking {self._url}", "dim")
        return head.append_text(_state(event)).append(f"  {self._url}", "dim")


def plain_line(event: LiveEvent) -> str:
    """Return an event as one line of text."""
    if not isinstance(event, ReadyEvent):
        return f"{one_line(event.model)}: {_state(event).plain}"
    return "; ".join(
        [
            f"{event.tokens.output_per_second or 0.0:.1f} tokens/s",
            f"{event.tokens.prompt_per_second or 0.0:.1f} prompt tokens/s",
            " ".join(f"{one_line(lane.lane)} {_percent(lane.busy)}" for lane in event.lanes),
            f"{event.queue.running} running, {event.queue.waiting} waiting",
            f"cache {event.kv.held} of {event.kv.blocks}",
            f"memory {format_bytes(event.memory.process_bytes)}",
        ]
    )


def sparkline(values: Sequence[float], *, is_ascii: bool = False) -> str:
    """Return one character per value, the highest for the largest; "" for none."""
    levels = _ASCII_SPARKS if is_ascii else _SPARKS
    high = max([*values, 0.0]) or 1.0
    top = len(levels) - 1
    return "".join(levels[round(max(value, 0.0) / high * top)] for value in values)


def _state(event: LiveEvent) -> Text:
    match event:
        case LoadingEvent(load=load):
            step = one_line(load.step or "starting")
            place = f"{load.done + 1} of {load.total}"
            return Text(f"loading: {step} ({place}), {load.seconds:.1f} s", "yellow")
        case ReadyEvent():
            return Text("ready, recording a timeline" if event.tracing else "ready", "green")
        case IdleEvent():
            return Text(one_line(event.error), "dim")
        case StoppedEvent() | FailedEvent():
            return Text(one_line(event.error), "red")
        case _:
            assert_never(event)


def _rows() -> Table:
    """Return a table of a name, a number, and a cell for the rest of the line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(justify="right", no_wrap=True, min_width=6)
    table.add_column(no_wrap=True, overflow="crop")
    return table


def _speed_rows(event: ReadyEvent, speeds: Sequence[float], *, is_ascii: bool) -> Table:
    table = _rows()
    speed = f"{event.tokens.output_per_second or 0.0:.1f}"
    table.add_row(
        "tokens/s", Text(speed, "bold"), Text(sparkline(speeds, is_ascii=is_ascii), "cyan")
    )
    table.add_row("prompt/s", f"{event.tokens.prompt_per_second or 0.0:.1f}", "")
    return table


def _lane_rows(event: ReadyEvent, width: int, *, is_ascii: bool) -> Table:
    table = _rows()
    for lane in event.lanes:
        style = "cyan" if lane.work else "bright_black"
        bar = _bar(lane.busy or 0.0, width, style, is_ascii=is_ascii)
        table.add_row(one_line(lane.lane), _percent(lane.busy), bar)
    return table


def _fact_rows(event: ReadyEvent) -> Table:
    queue, kv, experts, memory = event.queue, event.kv, event.experts, event.memory
    found = "" if kv.prefix_hit_share is None else f", {kv.prefix_hit_share:.0%} of prompts found"
    tiers = f"; hot ones got {experts.hot_share:.0%} of the choices" if experts.hot else ""
    process, left = format_bytes(memory.process_bytes), format_bytes(memory.available_bytes)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    table.add_row(
        "requests",
        f"{queue.running} running ({queue.decoding} writing), {queue.waiting} waiting",
    )
    table.add_row("cache", f"{kv.held} of {kv.blocks} blocks held, {kv.cached} kept{found}")
    table.add_row("drafts", _drafted(event.drafts))
    table.add_row("experts", _in_memory(experts.memory) + tiers)
    if experts.workers:
        table.add_row("workers", "; ".join(map(_worker, experts.workers)))
    table.add_row("memory", f"{process} in this process, {left} left")
    return table


def _worker(worker: Worker) -> str:
    speed = worker.link_bytes_per_second
    return worker.state + (f", link {format_bytes(speed)}/s" if speed else "")


def _drafted(drafts: Drafts) -> str:
    why = "" if drafts.why_off is None else f"; off: {one_line(drafts.why_off)}"
    if not drafts.drafted:
        return "none verified" + why
    return f"{drafts.accepted / drafts.drafted:.0%} of {drafts.drafted} accepted{why}"


def _in_memory(reads: ExpertReads | None) -> str:
    if reads is None:
        return "read by the operating system alone"
    if reads.resident:
        return "all in memory"
    if reads.hit_share is None:
        return "all in memory" if reads.needless else "none needed yet"
    return (
        f"{reads.hit_share:.1%} in memory when needed, {format_bytes(reads.read_bytes)} read ahead"
    )


def _request_rows(event: ReadyEvent, width: int, *, is_ascii: bool) -> RenderableType:
    table = _rows()
    shown = event.requests[:_MAX_REQUESTS]
    for request in shown:
        state = _STATES.get(request.state, one_line(request.state))
        if request.prompt_computed < request.prompt_tokens:
            share = request.prompt_computed / request.prompt_tokens
            text = _bar(share, width, "green", is_ascii=is_ascii)
            text.append(f" {request.prompt_computed} of {request.prompt_tokens} prompt tokens")
        else:
            text = Text(f"{request.output_tokens} tokens after {request.prompt_tokens}")
        table.add_row(f"#{request.id}", state, text)
    more = event.queue.running + event.queue.waiting - len(shown)
    return Group(table, Text(f"and {more} more", "dim")) if more > 0 else table


def _bar(share: float, width: int, style: str, *, is_ascii: bool) -> Text:
    """Return a bar of `width` cells with its rest shown."""
    full, rest = ("#", ".") if is_ascii else ("█", "·")
    cells = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble((full * cells, style), (rest * (width - cells), "bright_black"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
