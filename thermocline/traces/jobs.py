"""The jobs that a trace shows, and which of them had to wait for which. Pure; knows no file and no figures.

A job is one stage of one chunk in one layer. It may have run on several threads at once, each with
spans of its own. Dependencies are those of the pipeline: within a chunk

    embed -> attend(0) -> router(0) -> hot, cold, remote(0) -> combine(0) -> attend(1) ... -> head

(a stage without a job is passed over), and between chunks of one request: attention of a layer comes
after the previous chunk's attention of that layer, and a decode chunk after the head of the chunk
that gave its token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.traces.events import InstantEvent, SpanEvent
from thermocline.traces.lanes import WORK_LANES, Name, Track
from thermocline.traces.overlap import total_ns, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from thermocline.traces.events import Args, Event
    from thermocline.traces.overlap import Interval

# The groups of a layer's stages; those of one group may run at the same time.
_LAYER_STAGES: Final = (
    (Name.ATTEND,),
    (Name.ROUTER,),
    (Name.HOT, Name.COLD, Name.REMOTE),
    (Name.COMBINE,),
)
_STAGES: Final = frozenset({Name.EMBED, Name.HEAD}.union(*_LAYER_STAGES))


@dataclass(frozen=True, slots=True)
class JobKey:
    """Which job: embed and head have no layer."""

    chunk: int
    name: Name
    layer: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """When a job ran, and how long it took of each resource: rising, disjoint intervals per track."""

    key: JobKey
    busy: Mapping[Track, tuple[Interval, ...]]

    @property
    def duration_ns(self) -> int:
        """How long the job occupied its resource: of several, the one that it occupied longest."""
        return max(total_ns(parts) for parts in self.busy.values())

    @property
    def start_ns(self) -> int:
        """The first moment of the job."""
        return min(parts[0][0] for parts in self.busy.values())

    @property
    def end_ns(self) -> int:
        """The last moment of the job."""
        return max(parts[-1][1] for parts in self.busy.values())


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What the scheduler said of a chunk; of a chunk whose plan is not in the trace, nothing."""

    chunk: int
    kind: str = ""
    tokens: int = 0
    requests: tuple[int, ...] = ()


def find_jobs(events: Iterable[Event]) -> dict[JobKey, Job]:
    """Return the jobs by key, in the order of chunks and, within a chunk, of dependency.

    Spans of other lanes than work lanes, without a chunk, or of no length are no jobs.
    """
    spans: defaultdict[JobKey, defaultdict[Track, list[Interval]]]
    spans = defaultdict(lambda: defaultdict(list))
    for event in events:
        if isinstance(event, SpanEvent) and event.lane in WORK_LANES:
            key = _key(event)
            if key is not None and event.end_ns > event.start_ns:
                track = Track(event.lane, event.index)
                spans[key][track].append((event.start_ns, event.end_ns))
    ordered = sorted(spans, key=_order)
    return {
        key: Job(key, {track: tuple(union(parts)) for track, parts in spans[key].items()})
        for key in ordered
    }


def find_plans(events: Iterable[Event]) -> dict[int, ChunkPlan]:
    """Return what the scheduler's instants say, by chunk."""
    plans: dict[int, ChunkPlan] = {}
    for event in events:
        if isinstance(event, InstantEvent) and event.name is Name.PLAN and event.args:
            chunk = int_arg(event.args, "chunk")
            if chunk is not None:
                kind = str(event.args.get("kind", ""))
                tokens = int_arg(event.args, "tokens") or 0
                plans[chunk] = ChunkPlan(chunk, kind, tokens, _requests(event.args))
    return plans


def dependencies(
    jobs: Mapping[JobKey, Job], plans: Mapping[int, ChunkPlan]
) -> dict[JobKey, frozenset[JobKey]]:
    """Return for each of `jobs` those that had to end before it started.

    jobs in the order of `find_jobs`: every job then comes after those that it waited for.
    """
    by_chunk: defaultdict[int, list[JobKey]] = defaultdict(list)
    for key in jobs:
        by_chunk[key.chunk].append(key)
    previous_chunk: dict[int, int] = {}  # by request
    result: dict[JobKey, frozenset[JobKey]] = {}
    for chunk, keys in by_chunk.items():
        plan = plans.get(chunk, ChunkPlan(chunk))
        before = {previous_chunk[request] for request in plan.requests if request in previous_chunk}
        heads = {JobKey(other, Name.HEAD, None) for other in before} & jobs.keys()
        for key, needed in _within_chunk(keys, heads if plan.kind == "decode" else set()):
            if key.name is Name.ATTEND:
                earlier = {JobKey(other, Name.ATTEND, key.layer) for other in before}
                needed |= earlier & jobs.keys()
            result[key] = frozenset(needed)
        previous_chunk |= dict.fromkeys(plan.requests, chunk)
    return result


def int_arg(args: Args | None, name: str) -> int | None:
    """Return the whole number that `args` has under `name`, None if there is none."""
    value = args.get(name) if args else None
    return value if isinstance(value, int) else None


def _within_chunk(
    keys: Iterable[JobKey], first_needs: set[JobKey]
) -> Iterator[tuple[JobKey, set[JobKey]]]:
    """Yield each job of a chunk with those of the stage before it; the first ones need `first_needs`."""
    before, group, at = first_needs, set[JobKey](), None
    for key in keys:
        place = _place(key)
        if place != at and group:
            before, group = group, set()
        at = place
        group.add(key)
        yield key, set(before)


def _order(key: JobKey) -> tuple[int, tuple[float, int], str]:
    return key.chunk, _place(key), key.name


def _place(key: JobKey) -> tuple[float, int]:
    """Return where in its chunk a job comes; jobs of one place do not wait for each other."""
    if key.layer is None:
        return (-1.0 if key.name is Name.EMBED else float("inf")), 0
    return float(key.layer), next(
        position for position, names in enumerate(_LAYER_STAGES) if key.name in names
    )


def _key(span: SpanEvent) -> JobKey | None:
    chunk, layer = int_arg(span.args, "chunk"), int_arg(span.args, "layer")
    if chunk is None or span.name not in _STAGES:
        return None
    if span.name in (Name.EMBED, Name.HEAD):
        return JobKey(chunk, span.name, None)
    return None if layer is None else JobKey(chunk, span.name, layer)


def _requests(args: Args) -> tuple[int, ...]:
    words = str(args.get("requests", "")).split()
    return tuple(int(word) for word in words if word.isdecimal())
