"""What `thermocline top` shows of a server: a screen, or a line where there is no screen. Knows no network."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from thermocline.cli.console import one_line
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from thermocline.cli.live_events import ExpertReads, LiveEvent, RequestProgress

_SPARKS: Final = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS: Final = "_.-=+*#@"
_MAX_SPEEDS: Final = 400
_MAX_BAR: Final = 44
_MAX_REQUESTS: Final = 12
_STATES: Final = {"waiting": "waiting", "prefill": "reading", "decode": "writing"}


class LiveScreen:
    """The newest event with the speeds before it. Print it with rich, at any width."""

    def __init__(self, url: str) -> None:
        self._url = one_line(url)
        self._event: LiveEvent | None = None
        self._away: str | None = None
        self._speeds: deque[float] = deque(maxlen=_MAX_SPEEDS)

    def take(self, event: LiveEvent) -> None:
        """Show this event from now on."""
        self._event, self._away = event, None
        if event.tokens is not None:
            self._speeds.append(event.tokens.output_per_second or 0.0)

    def say_away(self, why: str) -> None:
        """Say that the server is away; what it said last stays."""
        self._away = one_line(why)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the screen's parts for the present width."""
        yield self._head()
        event = self._event
        if event is None or event.tokens is None or event.queue is None:
            return
        is_ascii = options.ascii_only
        bar = max(min(options.max_width - 24, _MAX_BAR), 6)
        yield Text()
        yield self._speed_rows(options.max_width, is_ascii)
        yield Text()
        yield _lane_rows(event, bar, is_ascii)
        yield Text()
        yield _fact_rows(event)
        if event.requests:
            yield Text()
            yield _request_rows(event.requests, event, bar, is_ascii)

    def _head(self) -> RenderableType:
        event = self._event
        parts = [("thermocline", "bold"), "  "]
        if event is not None:
            parts += [(one_line(event.model), "bold cyan"), "  "]
        if self._away is not None:
            parts.append((f"no answer from {self._url} ({self._away}), trying again", "yellow"))
        elif event is None:
            parts.append((f"asking {self._url}", "dim"))
        else:
            parts += [
                (_state(event), _STATE_STYLES.get(event.state, "red")),
                ("  " + self._url, "dim"),
            ]
        return Text.assemble(*parts)

    def _speed_rows(self, width: int, is_ascii: bool) -> RenderableType:
        assert self._event is not None and self._event.tokens is not None
        tokens = self._event.tokens
        room = max(width - 24, 4)
        table = _rows()
        speed = f"{tokens.output_per_second or 0.0:.1f}"
        spark = sparkline(list(self._speeds)[-room:], is_ascii=is_ascii)
        table.add_row("tokens/s", Text(speed, "bold"), Text(spark, "cyan"))
        table.add_row("prompt/s", f"{tokens.prompt_per_second or 0.0:.1f}", "")
        return table


def plain_line(event: LiveEvent) -> str:
    """Return an event as one line of text."""
    if event.tokens is None or event.queue is None or event.kv is None:
        return f"{one_line(event.model)}: {_state(event)}"
    lanes = " ".join(f"{one_line(lane.lane)} {_percent(lane.busy)}" for lane in event.lanes)
    return "; ".join(
        [
            f"{event.tokens.output_per_second or 0.0:.1f} tokens/s",
            f"{event.tokens.prompt_per_second or 0.0:.1f} prompt tokens/s",
            lanes,
            f"{event.queue.running} running, {event.queue.waiting} waiting",
            f"cache {event.kv.held} of {event.kv.blocks}",
            f"memory {format_bytes(event.memory.process_bytes)}",
        ]
    )


def sparkline(values: Iterable[float], *, is_ascii: bool = False) -> str:
    """Return one character per value, the highest for the largest; "" for none."""
    levels = _ASCII_SPARKS if is_ascii else _SPARKS
    shown = list(values)
    high = max(shown, default=0.0)
    if high <= 0.0:
        return levels[0] * len(shown)
    top = len(levels) - 1
    return "".join(levels[round(min(max(value / high, 0.0), 1.0) * top)] for value in shown)


_STATE_STYLES: Final = {"ready": "green", "loading": "yellow"}


def _state(event: LiveEvent) -> str:
    if event.load is not None:
        step = one_line(event.load.step or "starting")
        place = f"{event.load.done + 1} of {event.load.total}"
        return f"loading: {step} ({place}), {event.load.seconds:.1f} s"
    if event.error is not None:
        return f"{one_line(event.state)}: {one_line(event.error)}"
    return "ready, recording a timeline" if event.tracing else one_line(event.state)


def _rows() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(justify="right", no_wrap=True, min_width=6)
    table.add_column(no_wrap=True, overflow="crop")
    return table


def _lane_rows(event: LiveEvent, width: int, is_ascii: bool) -> Table:
    table = _rows()
    for lane in event.lanes:
        style = "cyan" if lane.work else "bright_black"
        bar = _bar(lane.busy or 0.0, width, style, is_ascii)
        table.add_row(one_line(lane.lane), _percent(lane.busy), bar)
    return table


def _fact_rows(event: LiveEvent) -> RenderableType:
    assert event.queue is not None and event.kv is not None and event.experts is not None
    kv, experts = event.kv, event.experts
    hits = "" if kv.prefix_hit_share is None else f", {kv.prefix_hit_share:.0%} of prompts found"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    table.add_row(
        "requests",
        f"{event.queue.running} running ({event.queue.decoding} writing), {event.queue.waiting} waiting",
    )
    table.add_row("cache", f"{kv.held} of {kv.blocks} blocks held, {kv.cached} kept{hits}")
    tiers = f"; hot ones got {experts.hot_share:.0%} of the choices" if experts.hot else ""
    table.add_row("experts", _in_memory(experts.memory) + tiers)
    memory = event.memory
    table.add_row(
        "memory",
        f"{format_bytes(memory.process_bytes)} in this process, "
        f"{format_bytes(memory.available_bytes)} left",
    )
    return table


def _in_memory(reads: ExpertReads | None) -> str:
    if reads is None:
        return "read by the operating system alone"
    if reads.hit_share is None:
        return "all in memory" if reads.needless else "none needed yet"
    return (
        f"{reads.hit_share:.1%} in memory when needed, {format_bytes(reads.read_bytes)} read ahead"
    )


def _request_rows(
    requests: tuple[RequestProgress, ...], event: LiveEvent, width: int, is_ascii: bool
) -> RenderableType:
    assert event.queue is not None
    table = _rows()
    for request in requests[:_MAX_REQUESTS]:
        name = Text(f"#{request.id}", "dim")
        state = _STATES.get(request.state, one_line(request.state))
        if request.prompt_computed < request.prompt_tokens:
            bar = _bar(
                request.prompt_computed / request.prompt_tokens, width // 2, "green", is_ascii
            )
            bar.append(f" {request.prompt_computed} of {request.prompt_tokens} prompt tokens")
        else:
            bar = Text(f"{request.output_tokens} tokens after {request.prompt_tokens}")
        table.add_row(name, state, bar)
    more = event.queue.running + event.queue.waiting - min(len(requests), _MAX_REQUESTS)
    return Group(table, Text(f"and {more} more", "dim")) if more > 0 else table


def _bar(share: float, width: int, style: str, is_ascii: bool) -> Text:
    """Return a bar of `width` cells with its rest shown."""
    full, rest = ("#", ".") if is_ascii else ("█", "░")
    cells = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble((full * cells, style), (rest * (width - cells), "bright_black"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
