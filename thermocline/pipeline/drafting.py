"""Gets drafts for the next decode step, and tells drafters what came of the last one.

Between the speculator, which decides, and the scheduler, which plans. Owns the clock of both. Knows no logits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from thermocline.messages import DraftFigures
from thermocline.speculation.speculator import pruned
from thermocline.traces.lanes import Lane, Name
from thermocline.workers.lane import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from thermocline.messages import Chunk, ChunkId, RequestId
    from thermocline.pipeline.generation import Generation
    from thermocline.pipeline.scheduling.scheduler import Scheduler
    from thermocline.speculation.contract import Draft, DraftWish
    from thermocline.speculation.speculator import Speculator
    from thermocline.traces.recorder import Recorder

R = TypeVar("R")


class DraftLane(Protocol):
    """Where drafters compute."""

    def begin(self, name: Name, job: Callable[[], R], chunk: Chunk) -> Future[R]:
        """Have `job` run in the turn of chunks of this one's kind, and return its result to come."""
        ...


class Drafting:
    """Drives a speculator, for the step loop."""

    def __init__(
        self, speculator: Speculator, scheduler: Scheduler, recorder: Recorder, lane: DraftLane
    ) -> None:
        """lane: where drafters compute that take their time."""
        self.speculator = speculator
        self._lane = lane
        self._scheduler = scheduler
        self._recorder = recorder
        self._is_computing = False
        """A drafter is at work on its lane. No other call may reach it meanwhile."""
        self._later: list[Callable[[], None]] = []
        """Requests that came and went since: told afterwards, in order."""
        self._started_ns = 0
        """When the latest decode step began."""
        self._alone: ChunkId | None = None
        """That step, if nothing else was ever in flight beside it."""
        self._num_verified = self._num_accepted = 0
        """Rows of the step that is being taken."""

    def __repr__(self) -> str:
        return f"Drafting({self.speculator})"

    def begin(self, generation: Generation) -> None:
        """Take a request that was accepted."""
        if self._is_computing:
            self._later.append(partial(self.begin, generation))
            return
        request, names = generation.request, generation.options.speculate
        self.speculator.begin(
            request, generation.prompt, names if generation.max_new_tokens else ()
        )
        generation.drafts = DraftFigures(why_off=self.speculator.why_off(request))

    def end(self, request: RequestId) -> None:
        """Forget a request."""
        if self._is_computing:
            self._later.append(partial(self.end, request))
        else:
            self.speculator.end(request)

    def offer(self, generations: Mapping[RequestId, Generation]) -> None:
        """Offer the scheduler what the next decode step shall verify, unless `compute` does."""
        if self.speculator.computes or not self._is_wanted(generations):
            return
        wishes = self._scheduler.wishes()
        if wishes:
            start_ns = self._recorder.now_ns()
            drafts = self._instant_drafts(wishes, generations)
            self._choose(wishes, drafts, generations, start_ns)

    async def compute(self, generations: Mapping[RequestId, Generation], chunk: Chunk) -> None:
        """The same where drafters take their time: on their lane, in the turn of chunks like the one that ended."""
        if not (self.speculator.computes and self._is_wanted(generations)):
            return
        wishes = self._scheduler.wishes()
        if not wishes:
            return
        start_ns = self._recorder.now_ns()
        drafts = {each.request: each for each in self._instant_drafts(wishes, generations)}
        tasks = self.speculator.tasks(wishes, list(drafts.values()), len(wishes))
        for drafter, wanted in tasks:
            asked = [wish for wish in wanted if wish.request in generations]
            if not asked:
                continue
            job, begin_ns = partial(drafter.propose, asked), self._recorder.now_ns()
            self._is_computing = True
            try:
                proposed = await result_of(self._lane.begin(Name.DRAFT, job, chunk))
            finally:
                self._is_computing = False
                later, self._later = self._later, []
                for call in later:
                    call()
            seconds = (self._recorder.now_ns() - begin_ns) * 1e-9
            self.speculator.proposed(drafter, asked, proposed, seconds)
            for given in proposed:
                # A request may have ended meanwhile, or gone on without its draft.
                generation = generations.get(given.request)
                if generation is not None and generation.num_known == given.num_known:
                    draft = pruned(given, generation.num_possible)
                    drafts.pop(given.request, None)
                    if draft is not None:
                        drafts[draft.request] = draft
        left = [wish for wish in wishes if wish.request in generations]
        known = [draft for draft in drafts.values() if draft.request in generations]
        self._choose(left, known, generations, start_ns)

    def _is_wanted(self, generations: Mapping[RequestId, Generation]) -> bool:
        if self.speculator.wants_any(self._scheduler.num_decoding):
            return True
        self._say_why(generations.values())
        return False

    def _say_why(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            why_off = self.speculator.why_off(generation.request)
            if generation.drafts.why_off != why_off:
                generation.drafts = replace(generation.drafts, why_off=why_off)

    def _instant_drafts(
        self, wishes: Sequence[DraftWish], generations: Mapping[RequestId, Generation]
    ) -> list[Draft]:
        return [
            draft
            for given in self.speculator.instant_drafts(wishes)
            if (draft := pruned(given, generations[given.request].num_possible))
        ]

    def _choose(
        self,
        wishes: Sequence[DraftWish],
        drafts: Sequence[Draft],
        generations: Mapping[RequestId, Generation],
        start_ns: int,
    ) -> None:
        chosen = self.speculator.choose(drafts, len(wishes))
        for draft in chosen:
            self._scheduler.offer(draft)
        self._say_why(generations[wish.request] for wish in wishes)
        if chosen and self._recorder.enabled:
            args: dict[str, int | float | str] = {
                "requests": " ".join(str(draft.request) for draft in chosen),
                "tokens": sum(len(draft.tokens) for draft in chosen),
            }
            end_ns = self._recorder.now_ns()
            self._recorder.span(Lane.DRAFT, Name.DRAFT, start_ns, end_ns, args)

    def started(self, chunk: Chunk, *, is_alone: bool) -> None:
        """Note that a chunk is being sent. is_alone: none is in flight."""
        if not chunk.is_prompt:
            self._started_ns = self._recorder.now_ns()
        self._alone = chunk.id if is_alone and not chunk.is_prompt else None

    def computed(self, chunk: Chunk) -> None:
        """Note that a chunk is computed, in which nothing failed: its time is a price."""
        if self._alone != chunk.id:
            return
        # Tokens that are computed again after a preemption are no step.
        if all(segment.length == 1 + segment.num_drafted for segment in chunk.segments):
            took_ns = self._recorder.now_ns() - self._started_ns
            is_plain = not any(segment.num_drafted for segment in chunk.segments)
            self.speculator.step_took(chunk.num_tokens, took_ns * 1e-9, is_plain=is_plain)

    def verify(self, generation: Generation, num_drafted: int) -> None:
        """Count the drafted rows of a request's step, before the first of its tokens is chosen."""
        before = generation.drafts
        generation.drafts = replace(before, num_drafted=before.num_drafted + num_drafted)
        self._num_verified += num_drafted
        self.speculator.count(generation.request, num_drafted, 0)

    def accept(self, generation: Generation) -> None:
        """Count a drafted token that the model has chosen."""
        before = generation.drafts
        generation.drafts = replace(before, num_accepted=before.num_accepted + 1)
        self._num_accepted += 1
        self.speculator.count(generation.request, 0, 1)

    def taken(self, chunk: Chunk) -> None:
        """Note that all tokens of a step are chosen."""
        if self._num_verified and self._recorder.enabled:
            counts = {"drafted": self._num_verified, "accepted": self._num_accepted}
            args = {"chunk": chunk.id, "tokens": chunk.num_tokens, **counts}
            end_ns = self._recorder.now_ns()
            self._recorder.span(Lane.DRAFT, Name.VERIFY, self._started_ns, end_ns, args)
        self._num_verified = self._num_accepted = 0
