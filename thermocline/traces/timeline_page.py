"""One self-contained HTML page of a trace: its data, packed, and the page's own style and script.

Owns which columns the page gets. What it looks like is in `page/`; the figures are `report`'s.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections import defaultdict
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec

from thermocline.traces.events import AsyncSpanEvent, CounterEvent, InstantEvent, SpanEvent
from thermocline.traces.jobs import int_arg
from thermocline.traces.lanes import WORK_LANES, Lane, Name, Track
from thermocline.traces.report import make_report, report_as_dict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.traces.events import Args, Event, Trace

_SCRIPTS = ("model.js", "timeline.js", "panels.js", "controls.js", "page.js")
_FOLDER: Final = files("thermocline.traces") / "page"
# Level 9 takes four times as long for a page that is 1% smaller.
_GZIP_LEVEL = 6
_COLUMN_ARGS = ("chunk", "layer")


def timeline_page(trace: Trace) -> str:
    """Return the page: it loads nothing, and shows text of the trace as text only."""
    return page_around(pack_timeline(trace))


def pack_timeline(trace: Trace) -> bytes:
    """Return what the page's scripts read, as gzipped JSON."""
    return gzip.compress(msgspec.json.encode(_page_data(trace)), _GZIP_LEVEL, mtime=0)


def page_around(packed: bytes) -> str:
    """Return the page of what `pack_timeline` made."""
    style, script = _code()
    parts = {
        "/*POLICY*/": page_policy(),
        "/*STYLE*/": style,
        "/*SCRIPT*/": script,
        "/*DATA*/": base64.b64encode(packed).decode(),
    }
    page = (_FOLDER / "page.html").read_text("utf-8")
    for mark, content in parts.items():
        page = page.replace(mark, content)
    return page


def page_policy() -> str:
    """Return the page's content security policy: its own code, and nothing from anywhere."""
    style, script = map(_hash_source, _code())
    return f"default-src 'none'; script-src {script}; style-src {style}"


def _code() -> tuple[str, str]:
    """Return the page's style and script."""
    scripts = ((_FOLDER / name).read_text("utf-8") for name in _SCRIPTS)
    return (_FOLDER / "page.css").read_text("utf-8"), "\n".join(scripts)


def _hash_source(text: str) -> str:
    """Return how a content security policy names this style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page_data(trace: Trace) -> dict[str, Any]:
    """Return what the scripts read; times in nanoseconds after the first event."""
    events = trace.events
    origin_ns = min((_start_ns(event) for event in events), default=0)
    extras = _Extras()
    return {
        "report": report_as_dict(trace, make_report(trace)),
        "names": list(Name),
        "tracks": _tracks(events, origin_ns, extras),
        "requests": [
            (event.name, str(event.span_id), *_times(event, origin_ns), event.args)
            for event in sorted(_of_type(events, AsyncSpanEvent), key=_start_ns)
        ],
        "counters": _counters(_of_type(events, CounterEvent), origin_ns),
        "extras": extras.listed,
        "experts": trace.expert_use,
        "length": max((_end_ns(event) for event in events), default=0) - origin_ns,
    }


class _Extras:
    """Sets of arguments, each of them listed once."""

    def __init__(self) -> None:
        self.listed: list[dict[str, int | float | str]] = [{}]
        self._index_by_items: dict[tuple[tuple[str, object], ...], int] = {(): 0}

    def index(self, args: Args | None, without: tuple[str, ...] = ()) -> int:
        """Return where in `listed` these arguments are, those of the names `without` left out."""
        items = tuple((k, v) for k, v in (args or {}).items() if k not in without)
        if items not in self._index_by_items:
            self._index_by_items[items] = len(self.listed)
            self.listed.append(dict(items))
        return self._index_by_items[items]


def _tracks(events: Iterable[Event], origin_ns: int, extras: _Extras) -> list[dict[str, Any]]:
    """Return one object of columns per track; `start` holds differences, which pack better."""
    spans: defaultdict[Track, list[SpanEvent]] = defaultdict(list)
    instants: defaultdict[Track, list[InstantEvent]] = defaultdict(list)
    for event in events:
        if isinstance(event, SpanEvent):
            spans[Track(event.lane, event.index)].append(event)
        elif isinstance(event, InstantEvent):
            instants[Track(event.lane)].append(event)
        elif isinstance(event, AsyncSpanEvent):
            instants.setdefault(Track(Lane.REQUESTS), [])  # the row on which it is drawn
    name_index = {name: index for index, name in enumerate(Name)}
    tracks = []
    for track in sorted(spans.keys() | instants.keys(), key=lambda track: track.order):
        of_track = sorted(spans[track], key=lambda span: (span.start_ns, -span.end_ns))
        starts = [origin_ns, *(span.start_ns for span in of_track)]
        tracks.append(
            {
                "label": track.label,
                "work": track.lane in WORK_LANES,
                "start": [after - before for before, after in pairwise(starts)],
                "duration": [span.end_ns - span.start_ns for span in of_track],
                "name": [name_index[span.name] for span in of_track],
                "chunk": [_column(span, "chunk") for span in of_track],
                "layer": [_column(span, "layer") for span in of_track],
                "more": [extras.index(span.args, _COLUMN_ARGS) for span in of_track],
                "instants": [
                    (event.at_ns - origin_ns, name_index[event.name], extras.index(event.args))
                    for event in sorted(instants[track], key=_start_ns)
                ],
            }
        )
    return tracks


def _counters(events: Iterable[CounterEvent], origin_ns: int) -> list[dict[str, Any]]:
    """Return the counters by name, without values that repeat the one before."""
    by_name: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for event in sorted(events, key=_start_ns):
        points = by_name[event.track]
        if not points or points[-1][1] != event.value:
            points.append((event.at_ns - origin_ns, event.value))
    return [
        {
            "name": name,
            "times": [at for at, _ in points],
            "values": [value for _, value in points],
            "max": max(value for _, value in points),
        }
        for name, points in sorted(by_name.items())
    ]


def _column(span: SpanEvent, name: str) -> int:
    value = int_arg(span.args, name)
    return -1 if value is None else value


def _times(event: AsyncSpanEvent, origin_ns: int) -> tuple[int, int]:
    return event.start_ns - origin_ns, event.end_ns - origin_ns


def _of_type(events: Iterable[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _start_ns(event: Event) -> int:
    return event.start_ns if isinstance(event, SpanEvent | AsyncSpanEvent) else event.at_ns


def _end_ns(event: Event) -> int:
    return event.end_ns if isinstance(event, SpanEvent | AsyncSpanEvent) else event.at_ns
