"""What bounded a run, in one sentence, and what its requests felt. Pure; the figures are those of the other modules here.

A resource bounded a run if it worked most of the time in which requests were served. Otherwise the order of the work
did, or what happens between the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from thermocline.traces.events import AsyncSpanEvent, InstantEvent, SpanEvent
from thermocline.traces.jobs import int_arg
from thermocline.traces.lanes import WORK_LANES, Lane, Name
from thermocline.traces.overlap import busy_intervals, total_ns, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thermocline.traces.events import Event
    from thermocline.traces.lanes import Track
    from thermocline.traces.overlap import Interval
    from thermocline.traces.report import DecodeReads
    from thermocline.traces.schedule import Schedule

# A resource that works more of the time bounds a run; nothing else could make it much shorter.
_BOUNDS: Final = 0.7
# Decoding that reads so much of what the machine can is bounded by its memory: no kernel reads all of it.
_READS: Final = 0.6
# Of the time, with less of which decoding is not what a run consists of.
_MOSTLY: Final = 0.5

_WORK: Final[Mapping[Lane, tuple[str, str]]] = {
    Lane.GPU_COMPUTE: ("Computing on the GPU", "it"),
    Lane.GPU_H2D: ("Copying weights to the GPU", "the copy engine"),
    Lane.HOT: ("Computing the hot experts", "their device"),
    Lane.CPU: ("Computing on the CPU", "its busiest thread"),
    Lane.PAGECACHE: ("Reading the model from its file", "the reader"),
    Lane.REMOTE: ("Waiting for expert workers", "the connection to them"),
}


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What requests felt, the median of those that ended within the trace.

    ttft_ns: from submission to the first token; None where no request had one. tokens_per_s: after the first token; None
    where no answer had a second one.
    """

    num_requests: int
    ttft_ns: float | None
    tokens_per_s: float | None


def find_request_times(events: Iterable[Event]) -> RequestTimes:
    """Return what the requests of a trace felt."""
    first: dict[int, int] = {}
    spans: list[AsyncSpanEvent] = []
    for event in events:
        if isinstance(event, InstantEvent) and event.name is Name.FIRST_TOKEN:
            request = int_arg(event.args, "request")
            if request is not None:
                first.setdefault(request, event.at_ns)
        elif isinstance(event, AsyncSpanEvent) and event.name is Name.REQUEST:
            spans.append(event)
    waits, speeds = [], []
    for span in spans:
        at_ns = first.get(span.span_id)
        if at_ns is None or not span.start_ns <= at_ns <= span.end_ns:
            continue
        waits.append(at_ns - span.start_ns)
        num_more = (int_arg(span.args, "output_tokens") or 0) - 1
        if num_more > 0 and span.end_ns > at_ns:
            speeds.append(num_more / ((span.end_ns - at_ns) * 1e-9))
    return RequestTimes(
        len(spans), median(waits) if waits else None, median(speeds) if speeds else None
    )


def find_verdict(events: Sequence[Event], schedule: Schedule, reads: DecodeReads | None) -> str:
    """Return what bounded the run, as a sentence with its evidence."""
    spans = [event for event in events if isinstance(event, SpanEvent)]
    busy = {track: parts for track, parts in busy_intervals(spans).items() if parts}
    work = {track: parts for track, parts in busy.items() if track.lane in WORK_LANES}
    if not work:
        return "Nothing was computed in this recording."
    window = _window(events, work)
    window_ns = total_ns(window)
    shares = {track: _within(parts, window) / window_ns for track, parts in busy.items()}
    top = max(work, key=shares.__getitem__)
    if shares[top] >= _BOUNDS:
        return _bounded_by(top, shares[top], spans, reads, schedule.decode_ns / window_ns)
    together = _within(union([part for parts in work.values() for part in parts]), window)
    idle = 1 - together / window_ns
    loop = max((share for track, share in shares.items() if track.lane is Lane.LOOP), default=0.0)
    if idle >= _MOSTLY or loop > shares[top]:
        return (
            f"What happens between the steps bounded this run: no resource worked in {idle:.0%} of the time, and the "
            f"engine's own loop was busy for {loop:.0%}."
        )
    return (
        f"The order of the work bounded this run: its jobs waited for each other, and no resource worked more than "
        f"{shares[top]:.0%} of the time ({top.label})."
    )


def _bounded_by(
    track: Track,
    share: float,
    spans: Iterable[SpanEvent],
    reads: DecodeReads | None,
    decode_share: float,
) -> str:
    if (
        track.lane is Lane.CPU
        and reads is not None
        and reads.share >= _READS
        and decode_share >= _MOSTLY
    ):
        return (
            f"Reading weights from memory bounded this run: while decoding, the CPU read {reads.bytes_per_s / 1e9:.1f} "
            f"GB/s, {reads.share:.0%} of what this machine can read."
        )
    what, who = _WORK[track.lane]
    text = f"{what} bounded this run: {who} worked {share:.0%} of the time"
    by_name: dict[Name, int] = {}
    for span in spans:
        if span.lane is track.lane and span.index == track.number:
            by_name[span.name] = by_name.get(span.name, 0) + span.end_ns - span.start_ns
    name = max(by_name, key=by_name.__getitem__)
    if len(by_name) > 1:
        text += f", most of it in {name} ({by_name[name] / sum(by_name.values()):.0%})"
    return f"{text}."


def _window(events: Iterable[Event], work: Mapping[Track, list[Interval]]) -> list[Interval]:
    """Return when requests were served: while one was open, or from the first work to the last."""
    spans = [
        (event.start_ns, event.end_ns)
        for event in events
        if isinstance(event, AsyncSpanEvent) and event.name is Name.REQUEST
    ]
    if total_ns(served := union(spans)):
        return served
    starts_ends = [edge for parts in work.values() for part in parts for edge in part]
    return [(min(starts_ends), max(starts_ends))]


def _within(parts: Sequence[Interval], window: Sequence[Interval]) -> int:
    """Return how long both lasted together; each is rising and disjoint."""
    total = at = 0
    for start, end in parts:
        while at < len(window) and window[at][1] <= start:
            at += 1
        number = at
        while number < len(window) and window[number][0] < end:
            total += min(end, window[number][1]) - max(start, window[number][0])
            number += 1
    return total
