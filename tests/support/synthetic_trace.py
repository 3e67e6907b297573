"""Traces of runs that never were: a small pipeline on simulated resources, with random durations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    ExpertUse,
    FlowEvent,
    InstantEvent,
    SpanEvent,
    Trace,
)
from thermocline.traces.lanes import Lane, Name, Track

_COST = {
    Name.EMBED: 2,
    Name.ATTEND: 30,
    Name.ROUTER: 4,
    Name.HOT: 40,
    Name.COLD: 70,
    Name.COMBINE: 6,
    Name.HEAD: 20,
}


@dataclass(slots=True)
class _Chunk:
    number: int
    kind: str
    tokens: int
    requests: tuple[int, ...]
    steps: list[tuple[Name, int | None]]
    ready_ns: int = 0
    attended_ns: dict[int, int] = field(default_factory=dict)


class SyntheticRun:
    """Runs chunks of some requests through layers, and records what each resource did.

    Prompt chunks are in flight together, `in_flight` at a time; then all requests decode together.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_threads: int = 2,
        num_layers: int = 4,
        num_requests: int = 2,
        prompt_chunks: int = 3,
        decode_steps: int = 4,
        in_flight: int = 2,
        unit_ns: int = 1000,
    ) -> None:
        self._random = random.Random(seed)
        self._cpu = [Track(Lane.CPU, index) for index in range(num_threads)]
        self._layers = num_layers
        self._unit_ns = unit_ns
        self._free_ns: dict[Track, int] = {}
        self._in_flight = in_flight
        self.events: list[SpanEvent | InstantEvent | CounterEvent | FlowEvent | AsyncSpanEvent] = []
        self._requests = range(1, num_requests + 1)
        self._prompt_chunks = prompt_chunks
        self._decode_steps = decode_steps

    def trace(self) -> Trace:
        """Return the trace of a run from its first plan to its last token."""
        plans = [
            ("prompt", 64, (request,))
            for request in self._requests
            for _ in range(self._prompt_chunks)
        ]
        end_ns = self._run_wave(0, plans, self._unit_ns)
        for step in range(self._decode_steps):
            decode = [("decode", len(self._requests), tuple(self._requests))]
            end_ns = self._run_wave(len(plans) + step, decode, end_ns + self._unit_ns)
        for request in self._requests:
            args = {"prompt_tokens": 64 * self._prompt_chunks, "output_tokens": self._decode_steps}
            self.events.append(AsyncSpanEvent(Name.REQUEST, request, 0, end_ns, args))
        rows = range(self._layers)
        counts = tuple(tuple(int(self._random.paretovariate(1)) for _ in range(32)) for _ in rows)
        use = ExpertUse(counts, tuple(tuple(range(0, 32, 4)) for _ in rows))
        return Trace(tuple(self.events), {"model": "synthetic", "cores": len(self._cpu)}, use)

    def _run_wave(
        self, first: int, plans: list[tuple[str, int, tuple[int, ...]]], at_ns: int
    ) -> int:
        waiting = [
            _Chunk(first + i, kind, tokens, requests, self._steps())
            for i, (kind, tokens, requests) in enumerate(plans)
        ]
        running: list[_Chunk] = []
        attended: dict[tuple[int, int], int] = {}
        end_ns = at_ns
        while waiting or running:
            while waiting and len(running) < self._in_flight:
                chunk = waiting.pop(0)
                chunk.ready_ns = end_ns if not running else at_ns
                at_ns = max(at_ns, chunk.ready_ns)
                self._plan(chunk, chunk.ready_ns)
                running.append(chunk)
            chunk = min(running, key=lambda c: (c.ready_ns, c.number))
            self._step(chunk, attended)
            if not chunk.steps:
                running.remove(chunk)
                at_ns = end_ns = max(end_ns, chunk.ready_ns)
                self._loop(end_ns)
        return end_ns

    def _steps(self) -> list[tuple[Name, int | None]]:
        steps: list[tuple[Name, int | None]] = [(Name.EMBED, None)]
        for layer in range(self._layers):
            steps += [(Name.ATTEND, layer), (Name.ROUTER, layer)]
            branches = [(Name.HOT, layer), (Name.COLD, layer)]
            steps += self._random.sample(branches, self._random.choice((1, 2, 2, 2)))
            if self._random.random() < 0.8:
                steps.append((Name.COMBINE, layer))
        return [*steps, (Name.HEAD, None)]

    def _step(self, chunk: _Chunk, attended: dict[tuple[int, int], int]) -> None:
        name, layer = chunk.steps.pop(0)
        ready_ns = chunk.ready_ns
        if name is Name.ATTEND:
            assert layer is not None
            ready_ns = max([ready_ns, *(attended.get((r, layer), 0) for r in chunk.requests)])
        branches = [name]
        if name in (Name.HOT, Name.COLD) and chunk.steps[0][0] in (Name.HOT, Name.COLD):
            branches.append(chunk.steps.pop(0)[0])
        ends = [self._job(chunk, branch, layer, ready_ns) for branch in branches]
        chunk.ready_ns = max(ends)
        if name is Name.ATTEND and layer is not None:
            attended |= {(request, layer): chunk.ready_ns for request in chunk.requests}

    def _job(self, chunk: _Chunk, name: Name, layer: int | None, ready_ns: int) -> int:
        args = {"chunk": chunk.number, "tokens": chunk.tokens}
        args |= {} if layer is None else {"layer": layer}
        if name in (Name.HOT, Name.COLD):
            args["experts"] = self._random.randint(1, 8)
        tracks = [Track(Lane.HOT)] if name is Name.HOT else self._cpu
        start_ns = max([ready_ns, *(self._free_ns.get(track, 0) for track in tracks)])
        scale = self._unit_ns * (1 + chunk.tokens // 16)
        ends = []
        for track in tracks:
            at_ns = start_ns + self._random.randint(0, self._unit_ns)
            for _ in range(self._random.randint(1, 3)):
                end_ns = at_ns + round(_COST[name] * scale * self._random.uniform(0.1, 0.4)) + 1
                span = SpanEvent(track.lane, name, at_ns, end_ns, dict(args), track.number)
                self.events.append(span)
                at_ns = end_ns + self._random.randint(0, self._unit_ns // 5)
            ends.append(end_ns)
        phases = {Name.EMBED: "start", Name.HEAD: "end"}
        first = self.events[-1]
        assert isinstance(first, SpanEvent)
        self.events.append(
            FlowEvent(
                chunk.number, first.lane, first.start_ns, phases.get(name, "step"), first.index
            )  # type: ignore[arg-type]
        )
        self._free_ns |= dict.fromkeys(tracks, max(ends))
        if name is Name.ROUTER:
            self._advise(chunk, layer or 0, max(ends))
        self.events.append(CounterEvent(f"channel {name}", self._random.randint(0, 2), start_ns))
        return max(ends)

    def _advise(self, chunk: _Chunk, layer: int, at_ns: int) -> None:
        track = Track(Lane.PAGECACHE)
        start_ns = max(at_ns, self._free_ns.get(track, 0))
        end_ns = start_ns + self._random.randint(5, 60) * self._unit_ns
        args = {"experts": 8, "bytes": 8 << 20, "layer": layer}
        self.events.append(SpanEvent(track.lane, Name.PREFETCH, start_ns, end_ns, args))
        self._free_ns[track] = end_ns
        for moment, value in ((start_ns, 8 << 20), (end_ns, 0)):
            self.events.append(CounterEvent(Name.BYTES_IN_FLIGHT, value, moment))

    def _plan(self, chunk: _Chunk, at_ns: int) -> None:
        args = {
            "chunk": chunk.number,
            "tokens": chunk.tokens,
            "kind": chunk.kind,
            "requests": " ".join(map(str, chunk.requests)),
        }
        self.events.append(InstantEvent(Lane.SCHEDULER, Name.PLAN, at_ns, args))

    def _loop(self, at_ns: int) -> None:
        end_ns = at_ns + self._unit_ns // 2
        self.events.append(SpanEvent(Lane.LOOP, Name.STEP, at_ns, end_ns))
