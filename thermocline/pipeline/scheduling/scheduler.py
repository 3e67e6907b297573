"""Decides which tokens form the next chunk. Pure: no torch, no asyncio, no clock.

One rule for prefill, prefix hits, decode and resumption: a request's computed tokens catch up with its
known ones. Scheduled and computed are counted apart, since a chunk in flight is scheduled and not yet
computed. Owns every request's progress. Admission owns who runs, request_blocks owns who holds which block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from thermocline.errors import BusyError, PromptTooLongError
from thermocline.kv.prefix import root_key
from thermocline.messages import ChunkId, Pooling, RequestId, RequestOptions, SegmentKind
from thermocline.pipeline.scheduling.admission import Admission
from thermocline.pipeline.scheduling.batching import Run, build_chunk
from thermocline.pipeline.scheduling.expanded_form import num_expanded, prefill_end
from thermocline.pipeline.scheduling.request import Request, RequestCache, RequestStatus
from thermocline.pipeline.scheduling.request_blocks import RequestBlocks
from thermocline.pipeline.scheduling.request_drafts import RequestDrafts
from thermocline.pipeline.scheduling.slots import Slots
from thermocline.speculation.contract import MAX_DRAFT_TOKENS, DraftWish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.config import SchedulerConfig
    from thermocline.kv.blocks import BlockAllocator
    from thermocline.kv.lending import SegmentLending, SegmentMoves
    from thermocline.kv.spill_index import PartCopy
    from thermocline.messages import Chunk
    from thermocline.pipeline.scheduling.cache_snapshot import CacheSnapshot
    from thermocline.pipeline.scheduling.request_spill import RequestSpill, SpillRead
    from thermocline.pipeline.scheduling.request_states import RequestStates
    from thermocline.pipeline.scheduling.request_windows import RequestWindows
    from thermocline.speculation.contract import Draft


_NO_OPTIONS: Final = RequestOptions()
_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED  # see request._RUNNING


class CaughtUp(NamedTuple):
    """A request that needs its next token, and the row of the chunk's logits to choose it from.

    The rows behind it are those of drafted tokens. A request that wants no token may have no row.
    """

    request: RequestId
    logits_row: int


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """How far one request is, in tokens. One that is not running waits for admission."""

    id: RequestId
    is_running: bool
    num_prompt_tokens: int
    num_computed_tokens: int
    num_known_tokens: int
    """Tokens of its prompt and of its answer so far."""


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """What the scheduler holds, for reports and tests."""

    num_waiting: int
    num_running: int
    num_decoding: int
    # Of chunks in flight.
    num_prompt_chunks: int
    num_decode_chunks: int
    prompt_tokens_limit: int
    total_preemptions: int
    total_prompt_tokens: int
    """Prompt tokens computed, those computed again after a preemption included."""
    total_output_tokens: int
    """Answer tokens sampled."""
    cache: CacheSnapshot
    requests: tuple[RequestSnapshot, ...]


class Scheduler:
    """Takes requests, forms chunks, takes results.

    Lower priority values come first, then earlier arrivals. Prompts of equal priority take turns.
    A request without room preempts the least important one.
    """

    def __init__(  # noqa: PLR0913 - what a request may hold, by name
        self,
        config: SchedulerConfig,
        allocator: BlockAllocator,
        max_context_tokens: int,
        *,
        kinds_differ: bool = True,
        expanded_tokens: int = 0,
        scored_tokens: int | None = None,
        states: RequestStates | None = None,
        windows: RequestWindows | None = None,
        spill: RequestSpill | None = None,
    ) -> None:
        """kinds_differ: prompt and decoded tokens differ in arithmetic, so no prefix of one stands for the other.
        expanded_tokens: so many tokens of a prompt, from a multiple of this on, take the expanded form of latent
        attention; 0 is never. scored_tokens: the most of a chunk that need logits; None is all. states: for recurrent layers, if there are any. windows: for layers with a sliding window.
        spill: where evicted prefixes go; None where they are lost.
        """
        assert config.prefill_chunk_tokens >= 1, "the caller resolves 0, which means automatic"
        assert config.max_prompt_chunks >= 1, "here, too"
        self.prompt_tokens_limit = config.prefill_chunk_tokens
        """Most tokens of the next prefill chunk; the step loop sets it before `plan`."""
        self.requests: dict[RequestId, Request] = {}
        """All accepted ones. A finished one stays until its chunks in flight return. Others only read them."""
        self._config = config
        self._blocks = RequestBlocks(
            allocator,
            shares_prefixes=config.prefix_cache,
            kinds_differ=kinds_differ,
            states=states,
            windows=windows,
            spill=spill,
        )
        self._drafts = RequestDrafts(self._blocks)
        self.slots = Slots(self._blocks, config.max_requests) if config.keeps_slots else None
        """What each slot computed last, where that is remembered."""
        self._admission = Admission(self._blocks, config.expected_answer_tokens)
        self._max_context_tokens = min(
            max_context_tokens, allocator.num_blocks * allocator.block_tokens
        )
        self._expanded_tokens = expanded_tokens
        self._scored_tokens = scored_tokens or config.prefill_chunk_tokens
        self._in_flight: dict[SegmentKind, set[ChunkId]] = {kind: set() for kind in SegmentKind}
        self._last_kind = SegmentKind.PROMPT
        self._numbers = count()
        self._next_chunk = ChunkId(0)
        self._total_prompt_tokens = self._total_output_tokens = 0
        self.moved: Sequence[tuple[int, int]] = ()
        """Blocks of a request that those of a branch have replaced, by which: of the latest `append` that drafted nothing."""

    def __repr__(self) -> str:
        return f"Scheduler({self._admission})"

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompt is scheduled."""
        return sum(request.is_past_prompt for request in self._admission.running)

    @property
    def cache(self) -> CacheSnapshot:
        """What the cache's blocks are used for."""
        return self._blocks.snapshot()

    def snapshot(self) -> SchedulerSnapshot:
        """Return the present numbers."""
        return SchedulerSnapshot(
            num_waiting=self._admission.num_waiting,
            num_running=len(self._admission.running),
            num_decoding=self.num_decoding,
            num_prompt_chunks=len(self._in_flight[SegmentKind.PROMPT]),
            num_decode_chunks=len(self._in_flight[SegmentKind.DECODE]),
            prompt_tokens_limit=self.prompt_tokens_limit,
            total_preemptions=self._admission.total_preemptions,
            total_prompt_tokens=self._total_prompt_tokens,
            total_output_tokens=self._total_output_tokens,
            cache=self.cache,
            requests=tuple(
                RequestSnapshot(
                    request.id,
                    request.status is _RUNNING,
                    request.num_prompt_tokens,
                    request.computed if request.is_admitted else 0,
                    len(request.known),
                )
                for request in self.requests.values()
                if request.status is not _FINISHED
            ),
        )

    def return_ended(self, read: SpillRead, damaged: Sequence[PartCopy], seconds: float) -> None:
        """Go on with a request whose prefix was read back; if parts are damaged, with what else there is."""
        self._blocks.return_ended(read, damaged, seconds)

    def submit(
        self,
        request: RequestId,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> int:
        """Accept a request and return how many tokens it may generate (0 when it only scores).

        max_new_tokens None means the rest of the context. Of the options, those count that say what is computed, in which
        order, and what is shared. Raises PromptTooLongError or BusyError, and changes nothing then.
        """
        assert prompt, "an empty prompt is refused before it gets here"
        assert request not in self.requests, f"request {request} was submitted twice"
        room = self._max_context_tokens - len(prompt)
        if room < (0 if max_new_tokens == 0 else 1):
            raise PromptTooLongError(len(prompt), self._max_context_tokens)
        if len(self.requests) >= self._config.max_requests:
            raise BusyError(
                f"{len(self.requests)} requests are running or waiting, the most that are "
                "accepted (--max-requests): try again later"
            )
        if self._admission.num_waiting >= self._config.max_queue:
            raise BusyError(
                f"{self._admission.num_waiting} requests are waiting, the most that may (--max-queue): "
                "try again later"
            )
        new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
        arrival = next(self._numbers)
        wants_all_states = options.pooling not in (None, Pooling.LAST)
        entry = Request(
            request,
            len(prompt),
            len(prompt) + new_tokens,
            rank=(options.priority, arrival),
            options=options,
            cache=RequestCache(
                root_key(options.cache_salt),
                num_expanded=num_expanded(len(prompt), self._expanded_tokens),
            ),
            known=list(prompt),
            turn=arrival,
            num_scored=0 if options.wants_prompt_logits or wants_all_states else None,
        )
        self.requests[request] = entry
        self._admission.enqueue(entry)
        return new_tokens

    def plan(self) -> Chunk | None:
        """Return the next chunk, scheduled from now on, or None when nothing can start."""
        for request in self._admission.admit():
            num_tokens = request.cache.num_full * self._blocks.block_tokens
            request.scheduled = request.computed = num_tokens
        # Decode first. With only one chunk in flight that would starve prefill, so they alternate.
        prompt_is_due = (
            self._last_kind is SegmentKind.DECODE and not self._in_flight[SegmentKind.PROMPT]
        )
        if prompt_is_due:
            return self._plan_prefill() or self._plan_decode()
        return self._plan_decode() or self._plan_prefill()

    def exchange(self, lending: SegmentLending) -> SegmentMoves:
        """Return which segments of the cache change hands before the planned chunk starts."""
        return self._blocks.exchange(lending)

    def commit(self, chunk: Chunk) -> tuple[CaughtUp, ...]:
        """Count a chunk as computed; return its requests that now need their next token.

        The caller gives each of them a token by `append`, or ends it by `finish`, before the next `plan`.
        A request that finished while the chunk was in flight releases its blocks and is not returned.
        """
        self._in_flight[chunk.segments[0].kind].remove(chunk.id)
        if is_prompt := chunk.is_prompt:
            self._total_prompt_tokens += chunk.num_tokens
        caught_up = []
        block_tokens = self._blocks.block_tokens
        num_rows = 0
        for segment in chunk.segments:
            num_rows += segment.num_logits
            request = self.requests[segment.request]
            assert chunk.id == min(request.in_flight), "a request's chunks end in order"
            request.in_flight.remove(chunk.id)
            if request.status is not _FINISHED:
                if is_prompt and segment is chunk.segments[0]:  # behind those that came meanwhile
                    request.turn = next(self._numbers)
                request.computed += segment.length - segment.num_drafted
                if is_prompt and request.num_scored is not None:
                    request.num_scored = max(request.num_scored, request.computed)
                if request.computed >= (request.cache.num_full + 1) * block_tokens:
                    self._blocks.commit(request)
                if request.computed == len(request.known):
                    caught_up.append(CaughtUp(request.id, num_rows - 1 - segment.num_drafted))
                    self._total_output_tokens += (
                        request.max_total_tokens > request.num_prompt_tokens
                    )
            if request.status is not _RUNNING:
                self._returned(request)
        return tuple(caught_up)

    def fail(self, chunk: Chunk) -> None:
        """End every request of a failed chunk; nothing that the chunk wrote is ever shared."""
        self._in_flight[chunk.segments[0].kind].remove(chunk.id)
        for segment in chunk.segments:
            self.finish(segment.request)
            request = self.requests[segment.request]
            request.in_flight.remove(chunk.id)
            self._returned(request)

    def adopt(self, given: Request) -> None:
        """Accept a request that a scheduler has given up, with the tokens that it had; it is computed from them again.

        It comes behind those of its priority that are here. No limit refuses it: it was accepted once.
        """
        assert given.id not in self.requests, f"request {given.id} is here already"
        arrival = next(self._numbers)
        root = root_key(given.options.cache_salt)
        entry = Request(
            given.id,
            given.num_prompt_tokens,
            given.max_total_tokens,
            rank=(given.rank[0], arrival),
            options=given.options,
            cache=RequestCache(root, num_expanded=given.cache.num_expanded),
            known=list(given.known),
            turn=arrival,
            num_scored=given.num_scored,
            held=given.held,
        )
        self.requests[given.id] = entry
        self._admission.enqueue(entry)

    def append(self, request: RequestId, token_id: int) -> int:
        """Add a sampled token to a request that has caught up; return the row of its step that has computed it, as it was
        drafted, 0 for none.

        If there is one, the caller gives or ends once more, by that row. If not, rows of other drafted tokens are taken
        back, and `moved` tells which blocks that replaced.
        """
        entry = self.requests[request]
        assert len(entry.known) < entry.max_total_tokens, f"request {request} grew past its limit"
        entry.known.append(token_id)
        # One that was preempted meanwhile holds nothing any more. It keeps its tokens.
        is_running = entry.status is _RUNNING
        if row := self._drafts.foresaw(request, token_id):
            self._total_output_tokens += 1
            if is_running:
                entry.scheduled += 1
                entry.computed += 1
            return row
        self.moved = ()
        rows = self._drafts.verified(request)
        if rows is not None and is_running:
            tree, last = rows.tree, rows.last
            if tree is None:
                self._blocks.take_back(entry, last)
            else:
                fork = tree.fork_of(last)
                self.moved = self._blocks.take_back(entry, tree.kept_state(last), fork)
        return 0

    def wishes(self) -> list[DraftWish]:
        """Return the requests of which the next decode step computes the newest token alone, without a draft so far."""
        if self._in_flight[SegmentKind.DECODE]:
            return []
        found = []
        for request in self._admission.running:
            num_known = len(request.known)
            max_tokens = min(request.max_total_tokens - num_known - 1, MAX_DRAFT_TOKENS)
            if (
                max_tokens > 0
                and request.can_decode
                and request.scheduled == num_known - 1
                and not self._drafts.is_offered(request.id, num_known)
            ):
                found.append(DraftWish(request.id, num_known, request.known[-1], max_tokens))
        return found

    def offer(self, draft: Draft) -> None:
        """Let the next decode step verify tokens, as far as there is room; a late draft does nothing."""
        if draft.request in self.requests:
            self._drafts.offer(draft)

    def finish(self, request: RequestId) -> bool:
        """End a request, for whatever reason; False when it is unknown or has ended.

        No more chunks of it start. Its blocks are free at once, or when its chunks in flight return.
        """
        entry = self.requests.get(request)
        if entry is None or entry.status is _FINISHED:
            return False
        self._drafts.forget(request)
        if self.slots is not None:
            self.slots.note(entry)
        if self._admission.finish(entry):
            del self.requests[request]
        return True

    def hold(self, request: RequestId) -> None:
        """Start no new chunk of a request until `resume`: its reader is behind."""
        if request in self.requests:
            self.requests[request].held = True

    def resume(self, request: RequestId) -> None:
        """Undo `hold`."""
        if request in self.requests:
            self.requests[request].held = False

    def check_integrity(self) -> None:
        """Assert that blocks, queues and requests agree."""
        self._admission.check_integrity()
        in_flight = set[ChunkId]()
        for request in self.requests.values():
            assert 0 <= request.computed <= request.scheduled <= len(request.known)
            assert len(request.known) <= request.max_total_tokens
            in_flight |= request.in_flight
        flying = (request.id for request in self.requests.values() if request.in_flight)
        self._drafts.check_integrity(frozenset(flying), frozenset(self.requests))
        assert in_flight == set().union(*self._in_flight.values()), "chunks in flight disagree"
        statuses = Counter(request.status for request in self.requests.values())
        assert statuses[RequestStatus.WAITING] == self._admission.num_waiting
        assert statuses[_RUNNING] == len(self._admission.running), "a request is in no queue"

    def _returned(self, request: Request) -> None:
        if self._admission.chunk_returned(request):
            del self.requests[request.id]

    def _plan_decode(self) -> Chunk | None:
        if self._in_flight[SegmentKind.DECODE]:
            return None
        runs = []
        # A preempted answer is computed again: all such tokens of one chunk are limited as in prefill.
        spare = self.prompt_tokens_limit
        for request in tuple(self._admission.running):
            if request.can_decode:
                end = min(len(request.known), request.scheduled + 1 + spare)
                run = self._schedule(request, end)
                if run is not None:
                    runs.append(run)
                    spare -= run.end - run.start - 1
        for index, run in enumerate(runs):
            # Behind all others: a drafted token never takes a place from a known one.
            runs[index] = self._drafts.extend(run, spare, len(self._admission.running))
            spare -= len(runs[index].drafted)
        return self._chunk(SegmentKind.DECODE, runs)

    def _plan_prefill(self) -> Chunk | None:
        if len(self._in_flight[SegmentKind.PROMPT]) >= self._config.max_prompt_chunks:
            return None
        runs: list[Run] = []
        budget = limit = self.prompt_tokens_limit
        logits = self._scored_tokens
        candidates = [request for request in self._admission.running if not request.is_past_prompt]
        for request in sorted(candidates, key=lambda entry: (entry.rank[0], entry.turn)):
            if not request.can_prefill:  # asked here: a request before it may have preempted it
                continue
            allowed = request.allowed(budget, logits)
            if not allowed:
                continue
            cell = min(self._expanded_tokens, self._config.prefill_chunk_tokens)
            end = prefill_end(request, allowed, cell)
            goes_on = end < request.num_prompt_tokens
            # Prompts that are short wait for what shares their chunk: one that goes on at most doubles it.
            if runs and (end - request.scheduled > budget or (goes_on and 2 * budget > limit)):
                continue
            run = self._schedule(request, end)
            if run is None:
                continue
            if not runs:  # a request that only fills a chunk up keeps its turn
                request.turn = next(self._numbers)
            runs.append(run)
            logits -= run.num_logits if request.num_scored is not None else 0
            budget -= run.end - run.start
            if budget <= 0:
                break
        return self._chunk(SegmentKind.PROMPT, runs)

    def _schedule(self, request: Request, end: int) -> Run | None:
        """Schedule tokens up to `end`, or as far as there is room; None if there is none.

        They count as in flight from here on, so preempting this request while the rest of the chunk is
        scheduled does not free its blocks.
        """
        start = request.scheduled
        if len(request.cache.blocks) * self._blocks.block_tokens < end:
            end = self._admission.grow(request, end)
            if end == start:
                return None
        state = self._blocks.state_use(request, start, end)
        num_logits, num_states = request.num_logits(end), request.num_states(end)
        run = Run(request, start, end, num_logits, state, num_states)
        request.scheduled = end
        request.in_flight.add(self._next_chunk)
        return run

    def _chunk(self, kind: SegmentKind, runs: Sequence[Run]) -> Chunk | None:
        if not runs:
            return None
        blocks = self._blocks
        chunk = build_chunk(self._next_chunk, kind, runs, blocks.block_tokens, blocks.windows)
        self._next_chunk = ChunkId(chunk.id + 1)
        self._in_flight[kind].add(chunk.id)
        self._last_kind = kind
        return chunk
