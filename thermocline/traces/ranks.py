"""Puts the timelines of several ranks of one model into one, by rank 0's clock. Pure; knows no file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    Event,
    FlowEvent,
    InstantEvent,
    SpanEvent,
    Trace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RANK: Final = "rank"
"""In the metadata of a rank's trace: which rank it is."""
CLOCK_OFFSET: Final = "clock_offset_ns"
"""There too: how far its clock was ahead of rank 0's when the ranks met."""
TRACKS_PER_RANK: Final = 100
"""Track 3 of a lane of rank 2 is track 203 of the one timeline."""
_IDS_PER_RANK: Final = 1 << 24


def merge_ranks(traces: Sequence[Trace]) -> Trace:
    """Return one trace of all, with rank 0's metadata. Raises ValueError for traces that are not those of ranks."""
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        rank = trace.metadata.get(RANK)
        if not isinstance(rank, int) or rank in by_rank:
            raise ValueError("each file must be the trace of another rank")
        by_rank[rank] = trace
    if 0 not in by_rank:
        raise ValueError("rank 0's trace is not among the files")
    events: list[Event] = []
    for rank, trace in sorted(by_rank.items()):
        events += _moved(trace, rank)
    first = by_rank[0]
    metadata = {**first.metadata, "ranks": len(by_rank)}
    return Trace(tuple(events), metadata, first.expert_use)


def _moved(trace: Trace, rank: int) -> Iterator[Event]:
    """Yield a rank's events on tracks of its own, at rank 0's times."""
    ahead_ns = int(trace.metadata.get(CLOCK_OFFSET, 0))
    first_track, first_id = rank * TRACKS_PER_RANK, rank * _IDS_PER_RANK
    for event in trace.events:
        match event:
            case SpanEvent():
                start_ns, end_ns = event.start_ns - ahead_ns, event.end_ns - ahead_ns
                index = event.index + first_track
                yield replace(event, start_ns=start_ns, end_ns=end_ns, index=index)
            case AsyncSpanEvent():
                start_ns, end_ns = event.start_ns - ahead_ns, event.end_ns - ahead_ns
                span_id = event.span_id + first_id
                yield replace(event, start_ns=start_ns, end_ns=end_ns, span_id=span_id)
            case FlowEvent():
                at_ns, index = event.at_ns - ahead_ns, event.index + first_track
                yield replace(event, at_ns=at_ns, index=index, flow_id=event.flow_id + first_id)
            case CounterEvent():
                track = f"rank {rank} {event.track}" if rank else event.track
                yield replace(event, at_ns=event.at_ns - ahead_ns, track=track)
            case InstantEvent():
                yield replace(event, at_ns=event.at_ns - ahead_ns)
