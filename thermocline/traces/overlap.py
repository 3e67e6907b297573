"""Owns the numbers read off a trace: how busy each lane was, and how much ran at the same time.

Pure. Knows no file format (see `chrome.read_chrome`) and draws nothing. Only spans count; a lane is
busy in the union of its spans, so that nested spans are not counted twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import WORK_LANES, Lane, Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thermocline.traces.events import Event

_Interval: TypeAlias = tuple[int, int]  # half open, nanoseconds


@dataclass(frozen=True, slots=True)
class LaneBusy:
    """How long a lane was busy, and which share of the wall time that is (0..1)."""

    lane: Lane
    num_spans: int
    busy_ns: int
    busy_share: float


@dataclass(frozen=True, slots=True)
class LanePair:
    """How long two lanes were busy at the same time; `first` comes before `second` in `Lane`."""

    first: Lane
    second: Lane
    overlap_ns: int


@dataclass(frozen=True, slots=True)
class StageTotal:
    """The spans of one name over all lanes: their number, and the sum of their durations."""

    name: Name
    num_spans: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class OverlapSummary:
    """What a trace says about overlap.

    lanes          each lane with spans, in the order of `Lane`
    pairs          each two of those lanes, also those that never overlap
    stages         each name with spans, the greatest total first
    wall_ns        from the first start to the last end of any span
    work_ns        time in which at least one work lane (`lanes.WORK_LANES`) was busy
    overlapped_ns  time in which at least two work lanes were busy
    """

    lanes: tuple[LaneBusy, ...]
    pairs: tuple[LanePair, ...]
    stages: tuple[StageTotal, ...]
    wall_ns: int
    work_ns: int
    overlapped_ns: int

    @property
    def overlapped_share(self) -> float:
        """The share (0..1) of the working time in which at least two work lanes were busy; 0 without work."""
        return self.overlapped_ns / self.work_ns if self.work_ns else 0.0


def summarize(events: Iterable[Event]) -> OverlapSummary:
    """Return the overlap numbers of `events`, in O(n log n) of the number of spans."""
    spans = [event for event in events if isinstance(event, SpanEvent)]
    wall_ns = max((s.end_ns for s in spans), default=0) - min(
        (s.start_ns for s in spans), default=0
    )
    intervals: defaultdict[Lane, list[_Interval]] = defaultdict(list)
    for span in spans:
        intervals[span.lane].append((span.start_ns, span.end_ns))
    busy = {lane: _union(intervals[lane]) for lane in Lane if lane in intervals}
    time_ns = _time_per_busy_set(busy)
    return OverlapSummary(
        lanes=tuple(
            LaneBusy(lane, len(intervals[lane]), busy_ns, busy_ns / wall_ns if wall_ns else 0.0)
            for lane, parts in busy.items()
            for busy_ns in [sum(end - start for start, end in parts)]
        ),
        pairs=tuple(
            LanePair(a, b, sum(ns for lanes, ns in time_ns.items() if {a, b} <= lanes))
            for a, b in combinations(busy, 2)
        ),
        stages=_stage_totals(spans),
        wall_ns=wall_ns,
        work_ns=sum(ns for lanes, ns in time_ns.items() if lanes & WORK_LANES),
        overlapped_ns=sum(ns for lanes, ns in time_ns.items() if len(lanes & WORK_LANES) >= 2),
    )


def check_lanes(events: Iterable[Event]) -> list[str]:
    """Return one sentence per span that reaches out of the span it starts in, on the same lane.

    A lane is one resource: its spans follow each other or nest. Partial overlap means that two
    resources share a lane, or that a hook measures waiting.
    """
    violations: list[str] = []
    open_spans: defaultdict[Lane, list[SpanEvent]] = defaultdict(list)
    spans = [event for event in events if isinstance(event, SpanEvent)]
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        stack = open_spans[span.lane]
        while stack and stack[-1].end_ns <= span.start_ns:
            stack.pop()
        if stack and span.end_ns > stack[-1].end_ns:
            outer = stack[-1]
            violations.append(
                f"lane {span.lane}: {span.name} [{span.start_ns}, {span.end_ns}) ns reaches out of "
                f"{outer.name} [{outer.start_ns}, {outer.end_ns}) ns"
            )
        stack.append(span)
    return violations


def _union(intervals: list[_Interval]) -> list[_Interval]:
    """Return the same time as rising, disjoint intervals that do not touch; empty ones vanish."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def _time_per_busy_set(busy: Mapping[Lane, list[_Interval]]) -> dict[frozenset[Lane], int]:
    """Return how long exactly each set of lanes was busy (the empty set too). Intervals per lane are disjoint."""
    edges = sorted(
        (at_ns, is_start, lane)
        for lane, parts in busy.items()
        for start, end in parts
        for at_ns, is_start in ((start, True), (end, False))
    )
    time_ns: defaultdict[frozenset[Lane], int] = defaultdict(int)
    active: frozenset[Lane] = frozenset()
    previous_ns = edges[0][0] if edges else 0
    for at_ns, is_start, lane in edges:
        if at_ns > previous_ns:
            time_ns[active] += at_ns - previous_ns
            previous_ns = at_ns
        active = active | {lane} if is_start else active - {lane}
    return dict(time_ns)


def _stage_totals(spans: Iterable[SpanEvent]) -> tuple[StageTotal, ...]:
    durations: defaultdict[Name, list[int]] = defaultdict(list)
    for span in spans:
        durations[span.name].append(span.end_ns - span.start_ns)
    totals = [StageTotal(name, len(parts), sum(parts)) for name, parts in durations.items()]
    return tuple(sorted(totals, key=lambda total: (-total.total_ns, total.name)))
