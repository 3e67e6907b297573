"""The step loop: plan a chunk, inject it, take its result, sample, publish. Owns no request state.

Runs on the engine's thread; `submit` and `abort` are called there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from thermocline.errors import (
    DeviceFaultError,
    EngineClosedError,
    EngineError,
    ModelChangedError,
    ThermoclineError,
)
from thermocline.messages import FinishReason, SegmentKind
from thermocline.pipeline.execution.queues import ChannelClosed
from thermocline.pipeline.execution.runner import ChunkFailed
from thermocline.pipeline.prompt_ticks import PromptTicks
from thermocline.speculation.contract import Verified
from thermocline.traces.busy import BusyTime
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.experts.routing_log import RoutingLog
    from thermocline.kv.lending import SegmentLending, SegmentMoves
    from thermocline.messages import Chunk, FloatArray, RequestId, StepResult
    from thermocline.pipeline.drafting import Drafting
    from thermocline.pipeline.generation import Generation
    from thermocline.pipeline.scheduling.chunk_size_feedback import ChunkSizeFeedback
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.scheduler import Scheduler, SchedulerSnapshot
    from thermocline.pipeline.scheduling.slots import Slots
    from thermocline.pipeline.spilling import Spilling
    from thermocline.traces.recorder import Recorder


class CacheRoom(Protocol):
    """A device's memory of which the cache and experts have segments in turn."""

    @property
    def lending(self) -> SegmentLending:
        """What decides who has which."""
        ...

    def exchange(self, moves: SegmentMoves) -> None:
        """Let segments change hands; never waits. Chunks that start later wait until those taken back are free."""
        ...


class Watch(Protocol):
    """What tells whether the model is still what was opened."""

    def change(self) -> ModelChangedError | None:
        """Return why results may be wrong, None if they are right. Takes microseconds."""
        ...


class ChunkRunner(Protocol):
    """What computes chunks: see `Runner`, which does so in this process."""

    @property
    def has_credit(self) -> bool:
        """Whether one more chunk may start."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Chunks that were injected and not received yet."""
        ...

    def share_done(self, chunk: Chunk) -> float:
        """Return how much of a chunk's layers is behind it, 0 to 1; 0 where that is not known."""
        ...

    def inject(self, chunk: Chunk, *, is_beside_answers: bool = False) -> None:
        """Start a chunk; the caller has seen `has_credit`."""
        ...

    async def receive(self) -> StepResult | ChunkFailed:
        """Return the next chunk's end, and its credit. Raises ChannelClosed after `close`."""
        ...

    def abandon(self, request: RequestId) -> None:
        """Note that nobody waits for a request any more."""
        ...

    def close(self) -> None:
        """Take no more chunks."""
        ...

    def check_integrity(self) -> None:
        """Assert that nothing is left of chunks that ended."""
        ...


class StepLoop:
    """Drives a runner with what the scheduler plans."""

    def __init__(  # noqa: PLR0913 - what a step has to do with, by name
        self,
        scheduler: Scheduler,
        runner: ChunkRunner,
        recorder: Recorder,
        chunk_size: ChunkSizeFeedback | None = None,
        routing_log: RoutingLog | None = None,
        room: CacheRoom | None = None,
        watch: Watch | None = None,
        drafting: Drafting | None = None,
        spilling: Spilling | None = None,
    ) -> None:
        """chunk_size: sets the size of prefill chunks beside decode steps; None leaves it as configured.

        routing_log: where the stages note the experts of requests that want to know them. room: what the cache shares
        with experts; None where each has its own. watch: asked before a chunk's results are given out. drafting: gets
        drafts for decode steps; None for none, ever. spilling: what copies the cache to its second tier; None without one.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._chunk_size = chunk_size
        self._routing_log = routing_log
        self._room = room
        self._watch = watch
        self.drafting = drafting
        """What gets drafts. Others only read its figures."""
        self.spilling = spilling
        """What copies the cache to its second tier. Others only read its figures."""
        self._generations: dict[RequestId, Generation] = {}
        self._ticks = PromptTicks(self._generations, runner.share_done)
        self._busy = BusyTime()
        self._closed = False
        self._fault: DeviceFaultError | ModelChangedError | None = None

    def __repr__(self) -> str:
        return f"StepLoop({len(self._generations)} requests, {self._runner})"

    @property
    def num_requests(self) -> int:
        """Requests accepted and not ended."""
        return len(self._generations)

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """The requests accepted and not ended."""
        return tuple(self._generations)

    def busy_ns(self) -> int:
        """Return how long this thread has been busy with steps. May be called from any thread; never waits."""
        return self._busy.total_ns(self._recorder.now_ns())

    def snapshot(self) -> SchedulerSnapshot:
        """Return what is running and waiting, and where the cache's blocks are."""
        return self._scheduler.snapshot()

    @property
    def slots(self) -> Slots | None:
        """What each slot computed last, where that is remembered. Call `resume_planning` after a change."""
        return self._scheduler.slots

    def resume_planning(self) -> None:
        """Start what can start now: room in the cache has come free."""
        self._fill()

    def submit(self, generation: Generation) -> None:
        """Accept a request and start it when there is room. Raises RequestError or BusyError, and what ended the engine."""
        self.check_model()
        if self._fault is not None:
            raise copied_fault(self._fault)
        if self._closed:
            raise EngineClosedError("the engine is closed: open a new one")
        if self.drafting is not None:
            self.drafting.speculator.check(generation.options.speculate)
        generation.max_new_tokens = self._scheduler.submit(
            generation.request,
            generation.prompt,
            max_new_tokens=generation.params.max_tokens,
            options=generation.options,
        )
        self._generations[generation.request] = generation
        if self.drafting is not None:
            self.drafting.begin(generation)
        self._fill()

    def abort(self, request: RequestId) -> bool:
        """End a request now; False when it has ended already. Its chunk in flight may still run."""
        generation = self._generations.get(request)
        if generation is None:
            return False
        generation.end(FinishReason.ABORT)
        self._forget(request)
        self._fill()  # another request may wait for its blocks
        return True

    def resume(self, request: RequestId) -> None:
        """The reader took the last logits: compute the next."""
        self._scheduler.resume(request)
        self._fill()

    def check_model(self) -> None:
        """Look whether the model's files were changed; if so, every request ends, and `run` with them."""
        if self._fault is not None or self._watch is None:
            return
        change = self._watch.change()
        if change is not None:
            self._end_by(change)
            self._end_when_idle()

    async def run(self) -> None:
        """Run steps until `close`. An unexpected error ends every request with EngineError.

        So does a device that does not work any more, with DeviceFaultError, and a model whose file was changed, with
        ModelChangedError. These are raised once no chunk is in flight.
        """
        try:
            await self._step_until_closed()
        except Exception as failure:
            error = EngineError(f"the engine failed: {failure!r}; open a new one")
            error.__cause__ = failure
            self._closed = True
            self._fail_all(error)
            raise
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End every request; `run` returns when no chunk is in flight. Further calls do nothing."""
        self._closed = True
        self._fail_all(EngineClosedError("the engine was closed while the request was running"))
        self._end_when_idle()

    def give_up(
        self, chunks: Sequence[Chunk], *, everything: bool
    ) -> list[tuple[Generation, Request]]:
        """Give up the requests of chunks that will have no result, or all requests; return those that still run.

        Nothing of these chunks is shared with anybody. What is returned goes to `adopt`, of this or of another loop.
        """
        wanted = set(self._generations)
        if not everything:
            wanted &= {request for chunk in chunks for request in chunk.requests}
        known = [
            (self._generations.pop(each), self._scheduler.requests[each]) for each in sorted(wanted)
        ]
        for chunk in chunks:
            self._scheduler.fail(chunk)
        for generation, _ in known:
            self._scheduler.finish(generation.request)
        return known

    def adopt(self, moved: Sequence[tuple[Generation, Request]]) -> None:
        """Go on with requests that were given up, from their tokens."""
        for generation, request in moved:
            self._generations[generation.request] = generation
            self._scheduler.adopt(request)
        self._fill()

    def check_integrity(self) -> None:
        """Assert that the scheduler and the runner are consistent."""
        self._scheduler.check_integrity()
        self._runner.check_integrity()

    async def _step_until_closed(self) -> None:
        while True:
            try:
                result = await self._runner.receive()
            except ChannelClosed:
                return
            start_ns = self._recorder.now_ns()
            self._busy.begin(start_ns)
            self._take(result)
            if self.drafting is not None:
                await self.drafting.compute(self._generations, result.chunk)
            self._fill()
            end_ns = self._recorder.now_ns()
            self._busy.end(end_ns)
            self._recorder.span(Lane.LOOP, Name.STEP, start_ns, end_ns)
            if self._closed:
                self._end_when_idle()

    def _fill(self) -> None:
        """Start what can start: chunks, and copies between the cache and its second tier."""
        self._start_chunks()
        if self.spilling is not None:
            self.spilling.start(self._fill)

    def _start_chunks(self) -> None:
        """Plan and inject chunks until the runner has no credit, or nothing can start."""
        if self._chunk_size is not None:
            is_decoding = self._scheduler.num_decoding > 0
            limit = self._chunk_size.chunk_tokens(is_decoding=is_decoding)
            self._scheduler.prompt_tokens_limit = limit
        if self.drafting is not None and self._runner.has_credit:
            self.drafting.offer(self._generations)
        while self._runner.has_credit:
            num_decoding = self._scheduler.num_decoding
            chunk = self._scheduler.plan()
            if chunk is None:
                break
            for segment in chunk.segments:
                generation = self._generations[segment.request]
                if not generation.has_started:
                    # The tokens before its first chunk came from the prefix cache.
                    generation.start(int(chunk.positions[segment.start]))
            self._record_plan(chunk)
            if self._room is not None:
                self._room.exchange(self._scheduler.exchange(self._room.lending))
            if self.drafting is not None:
                self.drafting.started(chunk, is_alone=not self._runner.num_in_flight)
            is_beside_answers = chunk.is_prompt and num_decoding > 0
            self._runner.inject(chunk, is_beside_answers=is_beside_answers)
            self._note_started(chunk)

    def _take(self, result: StepResult | ChunkFailed) -> None:
        self._note_ended(result.chunk)
        # First: a changed file explains every other failure, and nothing that was read from it counts.
        self.check_model()
        if isinstance(self._fault, ModelChangedError):
            self._scheduler.fail(result.chunk)
            self._take_routing(result.chunk)
            return
        if isinstance(result, ChunkFailed):
            if isinstance(result.error.__cause__, DeviceFaultError):
                self._end_by(result.error.__cause__)
            for request in result.chunk.requests:
                self._end_with_error(request, result.error)
            self._scheduler.fail(result.chunk)
            self._take_routing(result.chunk)
            return
        chunk = result.chunk
        if self.drafting is not None:
            self.drafting.computed(chunk)
        self._take_routing(chunk)
        self._report_prompts(result)
        drafted = {each.request: each.num_drafted for each in chunk.segments if each.num_drafted}
        for request, row in self._scheduler.commit(chunk):
            if self._generations[request].max_new_tokens:
                num_drafted = drafted.get(request, 0)
                self._advance(request, result.logits[row : row + 1 + num_drafted], num_drafted)
            else:
                self._generations[request].end(FinishReason.LENGTH)
                self._forget(request)
        if self.drafting is not None:
            self.drafting.taken(chunk)

    def _note_started(self, chunk: Chunk) -> None:
        self._ticks.begin(chunk)
        if self.spilling is not None:
            self.spilling.chunk_started(chunk)

    def _note_ended(self, chunk: Chunk) -> None:
        self._ticks.end(chunk)
        if self.spilling is not None:
            self.spilling.chunk_ended(chunk)
        if self._chunk_size is not None:
            self._chunk_size.chunk_ended(chunk)

    def _take_routing(self, chunk: Chunk) -> None:
        if self._routing_log is None or not chunk.wants_routing:
            return
        chosen = self._routing_log.take(chunk)
        for segment in chunk.segments:
            generation = self._generations.get(segment.request)
            if generation is not None and generation.options.wants_routing:
                rows = chosen[segment.start : segment.start + segment.length]
                generation.routed(int(chunk.positions[segment.start]), rows)

    def _report_prompts(self, result: StepResult) -> None:
        chunk = result.chunk
        for segment, rows, of_states in chunk.results_by_segment():
            generation = self._generations.get(segment.request)
            if generation is None or segment.kind is not SegmentKind.PROMPT:
                continue
            if generation.options.wants_prompt_logits and segment.num_logits:
                self._scheduler.hold(segment.request)
            last_row = segment.start + segment.length - 1
            num_computed = int(chunk.positions[last_row]) + 1
            states = None if result.states is None else result.states[of_states]
            generation.prompt_computed(num_computed, result.logits[rows], states)

    def _advance(self, request: RequestId, logits: FloatArray, num_drafted: int) -> None:
        """Choose a request's next token, and as many more as were foreseen. logits: [1 + num_drafted, V]."""
        generation, drafting = self._generations[request], self.drafting
        position = generation.num_known - 1
        if drafting is not None and num_drafted:
            drafting.verify(generation, num_drafted)
        tokens: list[int] = []
        rows = [0]
        while True:
            token_id = self._choose(generation, logits[rows[-1]])
            if token_id is None:
                return
            tokens.append(token_id)
            row = self._scheduler.append(request, token_id)
            if not row:
                break
            rows.append(row)
            if drafting is not None:
                drafting.accept(generation)
        if drafting is not None:
            right, moved = tuple(rows[1:]), tuple(self._scheduler.moved)
            verified = Verified(
                *(request, position, tuple(tokens), num_drafted, len(right)),
                rows=right,
                moved=moved,
            )
            drafting.speculator.observe(verified)

    def _choose(self, generation: Generation, logits: FloatArray) -> int | None:
        """Return the next token of a request, None if it ended by that, or by an error."""
        request = generation.request
        try:
            token_id = generation.advance(logits)
        except ThermoclineError as error:
            self._end_with_error(request, error)
        except Exception as error:  # noqa: BLE001 - a failure of one answer must not end the others
            failure = EngineError(
                f"choosing the next token failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._end_with_error(request, failure)
        else:
            if token_id is None:
                self._forget(request)
            return token_id
        return None

    def _end_with_error(self, request: RequestId, error: ThermoclineError) -> None:
        generation = self._generations.get(request)
        if generation is not None:
            generation.fail(error)
            self._forget(request)

    def _forget(self, request: RequestId) -> None:
        del self._generations[request]
        if self.drafting is not None:
            self.drafting.end(request)
        self._scheduler.finish(request)
        self._runner.abandon(request)

    def _end_by(self, fault: DeviceFaultError | ModelChangedError) -> None:
        self._closed, self._fault = True, fault
        self._fail_all(fault)

    def _end_when_idle(self) -> None:
        if not self._runner.num_in_flight:
            self._runner.close()

    def _fail_all(self, error: ThermoclineError) -> None:
        for request in tuple(self._generations):
            self._end_with_error(request, error)

    def _record_plan(self, chunk: Chunk) -> None:
        if self._recorder.enabled:
            args: dict[str, int | float | str] = {
                "chunk": chunk.id,
                "tokens": chunk.num_tokens,
                "kind": str(chunk.segments[0].kind),
                "requests": " ".join(map(str, chunk.requests)),
            }
            at_ns = self._recorder.now_ns()
            self._recorder.instant(Lane.SCHEDULER, Name.PLAN, at_ns, args)
            cache = self._scheduler.cache
            self._recorder.counter(Name.KV_FREE, cache.num_free_blocks, at_ns)
            self._recorder.counter(Name.KV_CACHED, cache.num_cached_blocks, at_ns)
            self._recorder.counter(Name.KV_HELD, cache.num_held_blocks, at_ns)


def copied_fault(fault: DeviceFaultError | ModelChangedError) -> EngineError:
    """Return an error that says the same, for one more who asks."""
    if isinstance(fault, ModelChangedError):
        return ModelChangedError(fault.path, fault.what)
    return DeviceFaultError(str(fault))
