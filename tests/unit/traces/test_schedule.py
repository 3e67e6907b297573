"""Claims about jobs, dependencies and efficiency, against another method on the raw file."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.synthetic_trace import SyntheticRun
from thermocline.traces.chrome import write_chrome
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.events import InstantEvent, SpanEvent, Trace
from thermocline.traces.jobs import dependencies, find_jobs, find_plans
from thermocline.traces.lanes import Lane, Name, Track
from thermocline.traces.report import make_report, report_as_dict
from thermocline.traces.schedule import analyze

_BOOKKEEPING = {"requests", "http", "loop", "scheduler"}
_RANKS = {"embed": (0,), "head": (2,)}
_LAYER_RANKS = {"attend": 0, "router": 1, "hot": 2, "cold": 2, "remote": 2, "combine": 3}


# The other method: the raw JSON, marks on a tape of every microsecond, chains by relaxation.


def _raw(path):
    """Return (track, name, first tick, end tick, args) of each work span, and the plans."""
    entries = json.loads(path.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    spans = [
        (tracks[e["tid"]], e["name"], round(e["ts"]), round(e["ts"] + e["dur"]), e.get("args", {}))
        for e in entries
        if e["ph"] == "X" and tracks[e["tid"]] not in _BOOKKEEPING
    ]
    plans = {
        e["args"]["chunk"]: e["args"] for e in entries if e["ph"] == "i" and e["name"] == "plan"
    }
    return spans, plans


def _ticks(spans):
    """Return the busy microseconds of each track, marked one by one."""
    tape = defaultdict(set)
    for track, _, start, end, _ in spans:
        tape[track].update(range(start, end))
    return tape


def _rank(name, layer):
    return (1, layer, _LAYER_RANKS[name]) if name in _LAYER_RANKS else _RANKS[name]


def _raw_jobs(spans):
    """Return the duration of each (chunk, rank, name) job: the most ticks on one track."""
    parts = defaultdict(list)
    for span in spans:
        _, name, start, end, args = span
        if "chunk" in args and end > start and (name in _RANKS or name in _LAYER_RANKS):
            parts[args["chunk"], _rank(name, args.get("layer")), name].append(span)
    return {job: max(map(len, _ticks(group).values())) for job, group in parts.items()}


def _must_wait(after, before, jobs, plans):
    """Whether job `after` had to wait for job `before`, decided for each pair by itself."""
    if after[0] == before[0]:
        lower = [job[1] for job in jobs if job[0] == after[0] and job[1] < after[1]]
        return bool(lower) and before[1] == max(lower)
    plan = plans.get(after[0], {})
    for request in plan.get("requests", "").split():
        earlier = [
            c for c, p in plans.items() if c < after[0] and request in p["requests"].split()
            and any(job[0] == c for job in jobs)
        ]  # fmt: skip
        if not earlier or before[0] != max(earlier):
            continue
        if after[2] == before[2] == "attend" and after[1] == before[1]:
            return True
        is_first = after[1] == min(job[1] for job in jobs if job[0] == after[0])
        if plan["kind"] == "decode" and is_first and before[2] == "head":
            return True
    return False


def _relaxed_chain(jobs, plans):
    """Return the longest chain: lengths grow along every pair until none grows any more."""
    pairs = [(b, a) for a in jobs for b in jobs if a != b and _must_wait(a, b, jobs, plans)]
    length = dict(jobs)
    has_grown = True
    while has_grown:
        has_grown = False
        for before, after in pairs:
            if length[before] + jobs[after] > length[after]:
                length[after] = length[before] + jobs[after]
                has_grown = True
    return max(length.values(), default=0)


def _expected(spans, jobs, plans):
    """Return (makespan, busiest, chain, bound) in ticks."""
    tape = {track: ticks for track, ticks in _ticks(spans).items() if ticks}
    busiest = max(map(len, tape.values()), default=0)
    makespan = max(map(max, tape.values())) + 1 - min(map(min, tape.values())) if tape else 0
    chain = _relaxed_chain(jobs, plans)
    return makespan, busiest, chain, max(busiest, chain)


def _found(bound):
    times = (bound.makespan_ns, bound.busiest_ns, bound.chain_ns, bound.bound_ns)
    assert all(time % 1000 == 0 for time in times)
    return tuple(time // 1000 for time in times)


def _of(spans, wanted):
    return [span for span in spans if wanted(span[4])]


def _is_job(span):
    return span[1] in _RANKS or span[1] in _LAYER_RANKS


def _in_microseconds(trace):
    """Return the trace with every time on a whole microsecond, as the tape has it."""

    def moved(event):
        if isinstance(event, SpanEvent):
            start_ns = event.start_ns // 1000 * 1000
            return replace(event, start_ns=start_ns, end_ns=-(-event.end_ns // 1000) * 1000)
        if isinstance(event, InstantEvent):
            return replace(event, at_ns=event.at_ns // 1000 * 1000)
        return None

    return replace(trace, events=tuple(e for e in map(moved, trace.events) if e is not None))


def _check_against_the_tape(trace, path):
    write_chrome(path, trace.events, metadata=trace.metadata)
    raw_spans, plans = _raw(path)
    spans = [span for span in raw_spans if span[3] > span[2]]
    schedule = analyze(read_chrome(path).events)
    jobs = _raw_jobs(spans)
    assert _found(schedule.total) == _expected(spans, jobs, plans)
    job_spans = [span for span in spans if _is_job(span) and "chunk" in span[4]]
    for part in schedule.chunks:
        inside = _of(job_spans, lambda args, n=part.number: args["chunk"] == n)
        assert _found(part.bound) == _expected(inside, _raw_jobs(inside), plans)
    requests = {r for plan in plans.values() for r in plan["requests"].split()}
    seen = {
        int(r)
        for r in requests
        if any(r in plans[j[0]]["requests"].split() for j in jobs if j[0] in plans)
    }
    assert {part.number for part in schedule.requests} == seen
    for part in schedule.requests:
        chunks = {c for c, p in plans.items() if str(part.number) in p["requests"].split()}
        inside = _of(job_spans, lambda args, c=chunks: args["chunk"] in c)
        kept = {job: ns for job, ns in jobs.items() if job[0] in chunks}
        # Edges are those of the whole trace: a request's chunk may wait for another request's too.
        whole = [(b, a) for a in kept for b in kept if a != b and _must_wait(a, b, jobs, plans)]
        length = dict(kept)
        for _ in kept:
            for before, after in whole:
                length[after] = max(length[after], length[before] + kept[after])
        makespan, busiest, _, _ = _expected(inside, {}, plans)
        chain = max(length.values())
        assert _found(part.bound) == (makespan, busiest, chain, max(busiest, chain))
    for part in schedule.layers:
        inside = [s for s in job_spans if s[4].get("layer") == part.number and s[1] in _LAYER_RANKS]
        visits = [
            _expected(own, _raw_jobs(own), plans)
            for chunk in {span[4]["chunk"] for span in inside}
            for own in [_of(inside, lambda args, c=chunk: args["chunk"] == c)]
        ]
        assert _found(part.bound) == tuple(map(sum, zip(*visits, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_simulated_run_agrees_with_the_tape(tmp_path, seed):
    """Total, layers, chunks and requests are what marking every microsecond and relaxing edges gives."""
    run = SyntheticRun(
        seed, num_layers=2, prompt_chunks=2, decode_steps=2, in_flight=1 + seed % 3, unit_ns=1500
    )
    trace = _in_microseconds(run.trace())
    _check_against_the_tape(trace, tmp_path / "t.json")
    assert 0 < analyze(trace.events).total.efficiency <= 1


_TRACKS = [Track(Lane.CPU, 0), Track(Lane.CPU, 1), Track(Lane.HOT), Track(Lane.PAGECACHE), Track(Lane.LOOP)]  # fmt: skip
_NAMES = [Name.EMBED, Name.ATTEND, Name.ROUTER, Name.HOT, Name.COLD, Name.COMBINE, Name.HEAD, Name.PREFETCH]  # fmt: skip


@st.composite
def _any_events(draw):
    """Spans and plans that no pipeline would make: any stage anywhere, chunks without plans, and so on."""
    events = []
    for _ in range(draw(st.integers(0, 14))):
        track, name = draw(st.sampled_from(_TRACKS)), draw(st.sampled_from(_NAMES))
        start, length = draw(st.integers(0, 40)) * 1000, draw(st.integers(0, 9)) * 1000
        args = {"chunk": draw(st.integers(0, 3)), "layer": draw(st.integers(0, 2))}
        if draw(st.integers(0, 9)) == 0:
            del args["chunk"]
        events.append(SpanEvent(track.lane, name, start, start + length, args, track.number))
    for chunk in draw(st.sets(st.integers(0, 3))):
        kind = draw(st.sampled_from(["prompt", "decode"]))
        requests = draw(st.sets(st.sampled_from("123"), min_size=1))
        args = {"chunk": chunk, "tokens": 1, "kind": kind, "requests": " ".join(sorted(requests))}
        events.append(InstantEvent(Lane.SCHEDULER, Name.PLAN, 0, args))
    return events


@pytest.mark.slow
@settings(max_examples=120, derandomize=True, deadline=None)
@given(events=_any_events())
def test_any_spans_agree_with_the_tape(tmp_path_factory, events):
    """The two methods agree on traces of any spans, not only on those that a pipeline makes."""
    trace = Trace(tuple(events), {})
    _check_against_the_tape(trace, tmp_path_factory.mktemp("any") / "t.json")


def _span(name, start, end, chunk=0, layer=None, track=_TRACKS[0]):
    args = {"chunk": chunk} | ({} if layer is None else {"layer": layer})
    return SpanEvent(track.lane, name, start, end, args, track.number)


def _plan(chunk, kind, requests):
    args = {"chunk": chunk, "tokens": 1, "kind": kind, "requests": requests}
    return InstantEvent(Lane.SCHEDULER, Name.PLAN, 0, args)


def test_hot_and_cold_of_one_layer_do_not_wait_for_each_other():
    """The chain takes the longer branch; perfect overlap of a single chunk is fully efficient."""
    schedule = analyze(
        [
            _span(Name.ATTEND, 0, 10, layer=0),
            _span(Name.ROUTER, 10, 12, layer=0),
            _span(Name.HOT, 12, 20, layer=0, track=Track(Lane.HOT)),
            _span(Name.COLD, 12, 32, layer=0),
            _span(Name.COMBINE, 32, 34, layer=0),
        ]
    )
    assert schedule.total.chain_ns == schedule.total.makespan_ns == 34
    assert schedule.total.efficiency == 1
    assert [job.name for job in schedule.critical_path] == ["attend", "router", "cold", "combine"]
    first = schedule.path_stages[0]
    assert (first.name, first.num_jobs, first.total_ns) == ("cold", 1, 20)


def test_a_lost_overlap_halves_the_efficiency():
    """Two chunks on two resources: side by side the bound is met, one after the other it is not."""
    hot = Track(Lane.HOT)

    def run(second_start):
        return analyze(
            [
                _span(Name.COLD, 0, 10, chunk=0, layer=0),
                _span(Name.HOT, second_start, second_start + 10, chunk=1, layer=0, track=hot),
            ]
        ).total.efficiency

    assert run(0) == 1
    assert run(10) == 0.5


def test_a_job_on_several_threads_lasts_as_long_as_its_longest_thread_worked():
    """Waiting between a thread's spans does not count, and threads are not added up."""
    (job,) = find_jobs(
        [
            _span(Name.COLD, 0, 10, layer=0),
            _span(Name.COLD, 15, 20, layer=0),
            _span(Name.COLD, 0, 12, layer=0, track=Track(Lane.CPU, 1)),
        ]
    )
    assert job.duration_ns == 15


def test_a_decode_chunk_waits_for_the_head_that_gave_its_tokens():
    """Each request of a batch adds the head of its own last chunk; a prompt chunk waits for no head."""
    events = [
        _plan(0, "prompt", "1"),
        _plan(1, "prompt", "2"),
        _plan(2, "prompt", "2"),
        _plan(3, "decode", "1 2"),
    ]
    for chunk in range(4):
        events += [
            _span(Name.EMBED, 0, 1, chunk),
            _span(Name.ATTEND, 1, 2, chunk, 0),
            _span(Name.HEAD, 2, 3, chunk),
        ]
    jobs = find_jobs(events)
    needs = dependencies(jobs, find_plans(events))
    named = {
        (job.chunk, str(job.name)): sorted((jobs[i].chunk, str(jobs[i].name)) for i in needed)
        for job, needed in zip(jobs, needs, strict=True)
    }
    assert named[3, "embed"] == [(0, "head"), (2, "head")]
    assert named[3, "attend"] == [(0, "attend"), (2, "attend"), (3, "embed")]
    assert named[2, "embed"] == []
    assert named[2, "attend"] == [(1, "attend"), (2, "embed")]
    assert named[1, "attend"] == [(1, "embed")]


def test_odd_arguments_make_no_job():
    """A chunk that is no number, a layer that is missing, a bookkeeping lane: busy time, but no job."""
    odd = [
        SpanEvent(Lane.CPU, Name.COLD, 0, 5, {"chunk": "x", "layer": 1}),
        SpanEvent(Lane.CPU, Name.COLD, 5, 9, {"chunk": 1}),
        SpanEvent(Lane.CPU, Name.HEAD, 9, 10, None),
        SpanEvent(Lane.LOOP, Name.HEAD, 0, 10, {"chunk": 1}),
        InstantEvent(Lane.SCHEDULER, Name.PLAN, 0, {"chunk": "x"}),
        InstantEvent(Lane.SCHEDULER, Name.PLAN, 0, None),
    ]
    schedule = analyze(odd)
    assert find_jobs(odd) == ()
    assert (schedule.total.busiest_ns, schedule.total.chain_ns) == (10, 0)
    assert (schedule.chunks, schedule.requests, schedule.plans) == ((), (), {})


def test_an_empty_trace_has_no_efficiency():
    """Without work all is zero and nothing divides by zero."""
    report = make_report(Trace((), {}))
    assert report.schedule.total.efficiency == 0
    assert report.reads is None
    json.dumps(report_as_dict(Trace((), {}), report), allow_nan=False)


def test_decoding_is_held_against_what_the_machine_reads():
    """Two decode chunks of 1000 bytes within 4 us read 0.5 GB/s, a quarter of 2 GB/s."""
    events = (
        _plan(0, "decode", "1"),
        _plan(1, "decode", "1"),
        _plan(2, "prompt", "2"),
        _span(Name.ATTEND, 0, 2000, 0, 0),
        _span(Name.ATTEND, 5000, 7000, 1, 0),
        _span(Name.ATTEND, 9000, 20000, 2, 0),
    )
    metadata = {"token_bytes": 1000, "read_bytes_per_s": 2e9}
    reads = make_report(Trace(events, metadata)).reads
    assert reads is not None
    assert reads.bytes_per_s == pytest.approx(0.5e9)
    assert reads.share == pytest.approx(0.25)
    for broken in (
        {"token_bytes": 1000},
        {**metadata, "read_bytes_per_s": 0},
        {**metadata, "token_bytes": "x"},
    ):
        assert make_report(Trace(events, broken)).reads is None
