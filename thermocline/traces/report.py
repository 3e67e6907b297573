"""Everything that is worth saying of one trace: overlap, schedule, and how near the machine's limit.

Pure. Gathers the figures and puts them into plain data for programs and for the page; words and tables
for people are the command line's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thermocline.traces.hot_layers import HotLayers, find_hot_layers
from thermocline.traces.overlap import OverlapSummary, summarize
from thermocline.traces.schedule import Bound, PartBound, Schedule, analyze
from thermocline.traces.verdict import RequestTimes, find_request_times, find_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from thermocline.traces.events import Trace
    from thermocline.traces.jobs import ChunkPlan

EFFICIENCY_NOTE = (
    "Efficiency compares this schedule with the best one for the same jobs. It does not judge the "
    "jobs: a slow kernel makes any schedule look efficient."
)


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """How fast decoding read its weights, at least, and what the machine can read, in bytes per second.

    Every decode chunk is counted as one token's bytes; a chunk of several tokens reads more.
    """

    bytes_per_s: float
    limit_bytes_per_s: float

    @property
    def share(self) -> float:
        """The part of the machine's limit, 0 to 1."""
        return self.bytes_per_s / self.limit_bytes_per_s


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The figures of one trace; `reads` and `hot_layers` are None where the trace does not tell.

    verdict: a sentence that says what bounded the run.
    """

    verdict: str
    requests: RequestTimes
    overlap: OverlapSummary
    schedule: Schedule
    reads: DecodeReads | None
    hot_layers: HotLayers | None


def make_report(trace: Trace) -> TraceReport:
    """Return the figures of `trace`."""
    schedule = analyze(trace.events)
    reads = _decode_reads(trace, schedule)
    return TraceReport(
        find_verdict(trace.events, schedule, reads),
        find_request_times(trace.events),
        summarize(trace.events),
        schedule,
        reads,
        find_hot_layers(trace.events, schedule.plans),
    )


def report_as_dict(trace: Trace, report: TraceReport) -> dict[str, Any]:
    """Return metadata and figures as JSON-ready data; times in nanoseconds, shares 0 to 1."""
    overlap, schedule, reads = report.overlap, report.schedule, report.reads
    layers = report.hot_layers
    return {
        "verdict": report.verdict,
        "metadata": dict(trace.metadata),
        "answers": {
            "requests": report.requests.num_requests,
            "ttft_ns": report.requests.ttft_ns,
            "tokens_per_s": report.requests.tokens_per_s,
        },
        "wall_ns": overlap.wall_ns,
        "work_ns": overlap.work_ns,
        "overlapped_ns": overlap.overlapped_ns,
        "overlapped_share": overlap.overlapped_share,
        "lanes": [
            {
                "lane": busy.track.label,
                "num_spans": busy.num_spans,
                "busy_ns": busy.busy_ns,
                "busy_share": busy.busy_share,
            }
            for busy in overlap.tracks
        ],
        "pairs": [
            {
                "first": pair.first.label,
                "second": pair.second.label,
                "overlap_ns": pair.overlap_ns,
            }
            for pair in overlap.pairs
        ],
        "stages": [
            {"name": stage.name, "num_spans": stage.num_spans, "total_ns": stage.total_ns}
            for stage in overlap.stages
        ],
        "schedule": {
            "total": _bound(schedule.total),
            "critical_path": {
                "length_ns": schedule.total.chain_ns,
                "stages": [
                    {"name": stage.name, "num_jobs": stage.num_jobs, "total_ns": stage.total_ns}
                    for stage in schedule.path_stages
                ],
                "jobs": [[job.chunk, job.name, job.layer] for job in schedule.critical_path],
            },
            "layers": _parts("layer", schedule.layers),
            "chunks": [
                part | _plan(schedule.plans.get(part["chunk"]))
                for part in _parts("chunk", schedule.chunks)
            ],
            "requests": _parts("request", schedule.requests),
            "note": EFFICIENCY_NOTE,
        },
        "decode_reads": None
        if reads is None
        else {
            "bytes_per_s": reads.bytes_per_s,
            "limit_bytes_per_s": reads.limit_bytes_per_s,
            "share": reads.share,
        },
        "decode_layers": None
        if layers is None
        else {"total": layers.num_layers, "all_hot": layers.num_hot, "share": layers.share},
    }


def _decode_reads(trace: Trace, schedule: Schedule) -> DecodeReads | None:
    token_bytes = _positive(trace.metadata, "token_bytes")
    limit = _positive(trace.metadata, "read_bytes_per_s")
    chunks = {part.number for part in schedule.chunks}
    num_decoded = sum(p.kind == "decode" for c, p in schedule.plans.items() if c in chunks)
    if token_bytes is None or limit is None or not schedule.decode_ns:
        return None
    return DecodeReads(token_bytes * num_decoded / (schedule.decode_ns * 1e-9), limit)


def _positive(metadata: Mapping[str, str | int | float], name: str) -> float | None:
    value = metadata.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "makespan_ns": bound.makespan_ns,
        "busiest": None if bound.busiest is None else bound.busiest.label,
        "busiest_ns": bound.busiest_ns,
        "chain_ns": bound.chain_ns,
        "bound_ns": bound.bound_ns,
        "efficiency": bound.efficiency,
    }


def _parts(name: str, parts: Iterable[PartBound]) -> list[dict[str, Any]]:
    return [{name: part.number} | _bound(part.bound) for part in parts]


def _plan(plan: ChunkPlan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    return {"kind": plan.kind, "tokens": plan.tokens, "requests": list(plan.requests)}
