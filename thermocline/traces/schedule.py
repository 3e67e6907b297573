"""How good a schedule was: the least time that its jobs could take, over the time that they took.

Pure. The lower bound is the larger of two: the busy time of the busiest resource, and the longest
chain of jobs that had to wait for each other. No schedule of the same jobs on the same resources is
shorter. It says nothing of the jobs themselves: slow kernels make any schedule look efficient.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.traces.events import SpanEvent
from thermocline.traces.jobs import JobKey, dependencies, find_jobs, find_plans
from thermocline.traces.lanes import WORK_LANES, Name, Track
from thermocline.traces.overlap import total_ns, union

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from thermocline.traces.events import Event
    from thermocline.traces.jobs import ChunkPlan, Job
    from thermocline.traces.overlap import Interval


@dataclass(frozen=True, slots=True)
class Bound:
    """A time, and the two that it can not be shorter than.

    makespan_ns  from the first start to the last end (of a layer: summed over chunks)
    busiest      the resource with the most busy time, None where several are summed up
    busiest_ns   that time
    chain_ns     the longest chain of dependent jobs
    """

    makespan_ns: int
    busiest: Track | None
    busiest_ns: int
    chain_ns: int
    bound_ns: int

    @property
    def efficiency(self) -> float:
        """Lower bound over makespan: 1 is the best that any schedule could do; 0 without work."""
        return self.bound_ns / self.makespan_ns if self.makespan_ns else 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """The bound of one layer, chunk or request; `number` is its index or id."""

    number: int
    bound: Bound


@dataclass(frozen=True, slots=True)
class StageShare:
    """How many jobs of the critical path are of one stage, and how long they took together."""

    name: Name
    num_jobs: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a trace says about its schedule.

    total          of the whole trace; its busiest resource counts every span on a work lane
    critical_path  the longest chain of dependent jobs, first to last
    path_stages    what that chain consists of, the greatest total first
    layers         summed over chunks: of the time between a chunk's first and last job of the layer
    chunks         each chunk's own jobs, from its first start to its last end
    requests       the jobs of each request's chunks, other requests of the same chunks included
    plans          what the scheduler said of each chunk
    """

    total: Bound
    critical_path: tuple[JobKey, ...]
    path_stages: tuple[StageShare, ...]
    layers: tuple[Part, ...]
    chunks: tuple[Part, ...]
    requests: tuple[Part, ...]
    plans: Mapping[int, ChunkPlan]


def analyze(events: Sequence[Event]) -> Schedule:
    """Return the schedule figures of `events`, in O(n log n) of the number of spans."""
    jobs, plans = find_jobs(events), find_plans(events)
    needs = dependencies(jobs, plans)
    path, chain_ns = _longest_chain(jobs, needs, jobs)
    by_chunk: defaultdict[int, list[JobKey]] = defaultdict(list)
    by_visit: defaultdict[tuple[int, int], list[JobKey]] = defaultdict(list)
    for key in jobs:
        by_chunk[key.chunk].append(key)
        if key.layer is not None:
            by_visit[key.layer, key.chunk].append(key)
    chunks_of: defaultdict[int, list[int]] = defaultdict(list)
    for plan in plans.values():
        for request in plan.requests:
            chunks_of[request].append(plan.chunk)

    def bound(keys: Collection[JobKey]) -> Bound:
        _, chain = _longest_chain(jobs, needs, keys)
        return _bound(_busy_of_jobs(jobs[key] for key in keys), chain)

    visits: defaultdict[int, list[Bound]] = defaultdict(list)
    for (layer, _), keys in by_visit.items():
        visits[layer].append(bound(keys))
    requests = {
        request: [key for chunk in sorted(chunks) for key in by_chunk.get(chunk, ())]
        for request, chunks in chunks_of.items()
    }
    return Schedule(
        total=_bound(_busy_of_spans(events), chain_ns),
        critical_path=path,
        path_stages=_path_stages(path, jobs),
        layers=tuple(Part(layer, _sum(visits[layer])) for layer in sorted(visits)),
        chunks=tuple(Part(chunk, bound(keys)) for chunk, keys in by_chunk.items()),
        requests=tuple(Part(r, bound(requests[r])) for r in sorted(requests) if requests[r]),
        plans=plans,
    )


def _bound(busy: Mapping[Track, list[Interval]], chain_ns: int) -> Bound:
    """Return the bound of work with these busy times per track (rising, disjoint)."""
    if not busy:
        return Bound(0, None, 0, chain_ns, chain_ns)
    start_ns = min(parts[0][0] for parts in busy.values())
    end_ns = max(parts[-1][1] for parts in busy.values())
    sums = {track: total_ns(busy[track]) for track in sorted(busy, key=lambda t: t.order)}
    busiest = max(sums, key=sums.__getitem__)
    busiest_ns = sums[busiest]
    return Bound(end_ns - start_ns, busiest, busiest_ns, chain_ns, max(busiest_ns, chain_ns))


def _sum(bounds: Iterable[Bound]) -> Bound:
    listed = list(bounds)
    return Bound(
        makespan_ns=sum(b.makespan_ns for b in listed),
        busiest=None,
        busiest_ns=sum(b.busiest_ns for b in listed),
        chain_ns=sum(b.chain_ns for b in listed),
        bound_ns=sum(b.bound_ns for b in listed),
    )


def _busy_of_spans(events: Iterable[Event]) -> dict[Track, list[Interval]]:
    busy: defaultdict[Track, list[Interval]] = defaultdict(list)
    for event in events:
        if isinstance(event, SpanEvent) and event.lane in WORK_LANES:
            busy[Track(event.lane, event.index)].append((event.start_ns, event.end_ns))
    return {track: merged for track, parts in busy.items() if (merged := union(parts))}


def _busy_of_jobs(jobs: Iterable[Job]) -> dict[Track, list[Interval]]:
    busy: defaultdict[Track, list[Interval]] = defaultdict(list)
    for job in jobs:
        for track, parts in job.busy.items():
            busy[track].extend(parts)
    return {track: union(parts) for track, parts in busy.items()}


def _longest_chain(
    jobs: Mapping[JobKey, Job],
    needs: Mapping[JobKey, frozenset[JobKey]],
    keys: Collection[JobKey],
) -> tuple[tuple[JobKey, ...], int]:
    """Return the longest chain within `keys` (in the order of `jobs`), and its length in nanoseconds."""
    length_ns: dict[JobKey, int] = {}
    before: dict[JobKey, JobKey] = {}
    for key in keys:
        known = [needed for needed in needs[key] if needed in length_ns]
        length_ns[key] = jobs[key].duration_ns
        if known:
            # The name breaks ties, so that equal chains give one answer.
            before[key] = max(known, key=lambda k: (length_ns[k], k.chunk, k.name))
            length_ns[key] += length_ns[before[key]]
    if not length_ns:
        return (), 0
    path = [max(length_ns, key=length_ns.__getitem__)]
    while path[-1] in before:
        path.append(before[path[-1]])
    return tuple(reversed(path)), length_ns[path[0]]


def _path_stages(path: Iterable[JobKey], jobs: Mapping[JobKey, Job]) -> tuple[StageShare, ...]:
    durations: defaultdict[Name, list[int]] = defaultdict(list)
    for key in path:
        durations[key.name].append(jobs[key].duration_ns)
    shares = [StageShare(name, len(parts), sum(parts)) for name, parts in durations.items()]
    return tuple(sorted(shares, key=lambda share: (-share.total_ns, share.name)))
