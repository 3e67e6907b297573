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
from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeAlias

from thermocline.traces.events import InstantEvent, SpanEvent
from thermocline.traces.lanes import WORK_LANES, Name, Track
from thermocline.traces.overlap import total_ns, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from thermocline.traces.events import Args, Event
    from thermocline.traces.lanes import Lane
    from thermocline.traces.overlap import Interval

# Where in its layer a stage comes; those of one place may run at the same time.
_PLACE_IN_LAYER: Final[Mapping[Name, int]] = {
    Name.ATTEND: 0,
    Name.ROUTER: 1,
    Name.HOT: 2,
    Name.COLD: 2,
    Name.REMOTE: 2,
    Name.COMBINE: 3,
}
_STAGES: Final = frozenset({Name.EMBED, Name.HEAD, *_PLACE_IN_LAYER})
_Key: TypeAlias = tuple[int, Name, int | None]


@dataclass(frozen=True, slots=True)
class Job:
    """One job (embed and head have no layer) and its time on each resource: rising, disjoint intervals."""

    chunk: int
    name: Name
    layer: int | None
    busy: Mapping[Track, tuple[Interval, ...]]

    @property
    def duration_ns(self) -> int:
        """How long the job occupied its resource: of several, the one that it occupied longest."""
        return max(total_ns(parts) for parts in self.busy.values())


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What the scheduler said of a chunk; of a chunk whose plan is not in the trace, nothing."""

    chunk: int
    kind: str = ""
    tokens: int = 0
    requests: tuple[int, ...] = ()


def find_jobs(events: Iterable[Event]) -> tuple[Job, ...]:
    """Return the jobs in the order of chunks and, within a chunk, of dependency.

    Spans of other lanes than work lanes, without a chunk, or of no length are no jobs.
    """
    spans: defaultdict[tuple[_Key, Lane, int], list[Interval]] = defaultdict(list)
    for event in events:
        if isinstance(event, SpanEvent) and event.lane in WORK_LANES:
            key = _key(event)
            if key is not None and event.end_ns > event.start_ns:
                spans[key, event.lane, event.index].append((event.start_ns, event.end_ns))
    busy: defaultdict[_Key, dict[Track, tuple[Interval, ...]]] = defaultdict(dict)
    for (key, lane, index), parts in spans.items():
        busy[key][Track(lane, index)] = tuple(union(parts))
    return tuple(Job(*key, busy[key]) for key in sorted(busy, key=_order))


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


def dependencies(jobs: Sequence[Job], plans: Mapping[int, ChunkPlan]) -> tuple[frozenset[int], ...]:
    """Return for each of `jobs` those that had to end before it started, as indices into `jobs`.

    jobs in the order of `find_jobs`: every job then comes after those that it waited for.
    """
    heads = {job.chunk: index for index, job in enumerate(jobs) if job.name is Name.HEAD}
    attends = {
        (job.chunk, job.layer): index for index, job in enumerate(jobs) if job.name is Name.ATTEND
    }
    previous_chunk: dict[int, int] = {}  # by request
    result: list[frozenset[int]] = []
    for chunk, indices in groupby(range(len(jobs)), key=lambda index: jobs[index].chunk):
        plan = plans.get(chunk, ChunkPlan(chunk))
        before = {previous_chunk[request] for request in plan.requests if request in previous_chunk}
        gave_token = before & heads.keys() if plan.kind == "decode" else set()
        first_needs = frozenset(heads[other] for other in gave_token)
        for index, needed in _within_chunk(jobs, indices, first_needs):
            if jobs[index].name is Name.ATTEND:
                layer = jobs[index].layer
                needed |= {attends[c, layer] for c in before if (c, layer) in attends}
            result.append(needed)
        previous_chunk |= dict.fromkeys(plan.requests, chunk)
    return tuple(result)


def int_arg(args: Args | None, name: str) -> int | None:
    """Return the whole number that `args` has under `name`, None if there is none."""
    value = args.get(name) if args else None
    return value if isinstance(value, int) else None


def _within_chunk(
    jobs: Sequence[Job], indices: Iterable[int], first_needs: frozenset[int]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield each job of a chunk with those of the place before it; the first ones need `first_needs`."""
    before = first_needs
    for _, places in groupby(
        indices, key=lambda index: _place(jobs[index].name, jobs[index].layer)
    ):
        group = frozenset(places)
        yield from ((index, before) for index in sorted(group))
        before = group


def _order(key: _Key) -> tuple[int, tuple[float, int], Name]:
    chunk, name, layer = key
    return chunk, _place(name, layer), name


def _place(name: Name, layer: int | None) -> tuple[float, int]:
    """Return where in its chunk a job comes; jobs of one place do not wait for each other."""
    if layer is None:
        return (-1.0 if name is Name.EMBED else float("inf")), 0
    return float(layer), _PLACE_IN_LAYER[name]


def _key(span: SpanEvent) -> _Key | None:
    if span.name not in _STAGES:
        return None
    chunk, layer = int_arg(span.args, "chunk"), int_arg(span.args, "layer")
    if chunk is None:
        return None
    if span.name not in _PLACE_IN_LAYER:
        return chunk, span.name, None
    return None if layer is None else (chunk, span.name, layer)


def _requests(args: Args) -> tuple[int, ...]:
    words = str(args.get("requests", "")).split()
    return tuple(int(word) for word in words if word.isdecimal())
