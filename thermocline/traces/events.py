"""Owns the typed records of a trace. All times are nanoseconds of one monotonic clock. Knows no file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from thermocline.traces.lanes import Lane, Name

Args: TypeAlias = Mapping[str, int | float | str]
FlowPhase: TypeAlias = Literal["start", "step", "end"]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A resource was busy in [start_ns, end_ns); `index` says which one of its lane."""

    lane: Lane
    name: Name
    start_ns: int
    end_ns: int
    args: Args | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class InstantEvent:
    """Something happened at one moment."""

    lane: Lane
    name: Name
    at_ns: int
    args: Args | None = None


@dataclass(frozen=True, slots=True)
class CounterEvent:
    """The counter track `track` has this value from `at_ns` on."""

    track: str
    value: float
    at_ns: int


@dataclass(frozen=True, slots=True)
class FlowEvent:
    """One point of the arrow `flow_id`; it belongs to the span that encloses `at_ns` on its track."""

    flow_id: int
    lane: Lane
    at_ns: int
    phase: FlowPhase
    index: int = 0


@dataclass(frozen=True, slots=True)
class AsyncSpanEvent:
    """Something lasted over [start_ns, end_ns) without owning a resource; such spans may overlap freely."""

    name: Name
    span_id: int
    start_ns: int
    end_ns: int
    args: Args | None = None


Event: TypeAlias = SpanEvent | InstantEvent | CounterEvent | FlowEvent | AsyncSpanEvent
Metadata: TypeAlias = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """How often each expert was chosen, [layers][experts], and which ones were hot, [layers][ids]."""

    counts: tuple[tuple[int, ...], ...]
    hot: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds: its events in file order, and what it was written with."""

    events: tuple[Event, ...]
    metadata: Metadata
    expert_use: ExpertUse | None = None
