"""Decides which tokens form the next chunk. Pure: no torch, no asyncio, no clock.

One rule for prefill and decode: a request's computed tokens catch up with its known ones. Scheduled and
computed are counted apart, since a chunk in flight is scheduled and not yet computed. Owns the life of
every request and its cache blocks; nobody else holds a `_Request`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import BusyError, PromptTooLongError
from thermocline.messages import Chunk, ChunkId, RequestId, Segment, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.config import SchedulerConfig
    from thermocline.kv.blocks import BlockAllocator


@dataclass(slots=True)
class _Request:
    id: RequestId
    known: list[int]
    """Token ids of the prompt and of the answer so far."""
    num_prompt_tokens: int
    max_total_tokens: int
    wants_all_logits: bool
    blocks: tuple[int, ...] = ()
    scheduled: int = 0
    computed: int = 0
    finished: bool = False
    held: bool = False
    """No new chunk starts until `resume`."""
    in_flight: set[ChunkId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """What the scheduler holds, for reports and tests."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_blocks: int


class Scheduler:
    """Takes requests, forms chunks, takes results.

    A request waits until blocks for its whole possible length are free, so that a running request
    can always finish; running requests take turns, one chunk each.
    """

    def __init__(
        self, config: SchedulerConfig, allocator: BlockAllocator, max_context_tokens: int
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._max_context_tokens = max_context_tokens
        self._waiting: deque[_Request] = deque()
        self._running: deque[_Request] = deque()
        self._requests: dict[RequestId, _Request] = {}
        self._next_chunk = 0

    def __repr__(self) -> str:
        return f"Scheduler({self.snapshot()})"

    def snapshot(self) -> SchedulerSnapshot:
        """Return the present numbers."""
        return SchedulerSnapshot(
            len(self._waiting),
            len(self._running),
            self._allocator.num_free,
            self._allocator.num_blocks,
        )

    def submit(
        self,
        request: RequestId,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None,
        wants_all_logits: bool = False,
    ) -> int:
        """Accept a request and return how many tokens it may generate (0 when it only scores).

        max_new_tokens None means the rest of the context. Raises PromptTooLongError or BusyError,
        in which case nothing was taken.
        """
        assert prompt, "an empty prompt is refused before it gets here"
        assert request not in self._requests, f"request {request} was submitted twice"
        room = self._max_context_tokens - len(prompt)
        if room < (0 if max_new_tokens == 0 else 1):
            raise PromptTooLongError(len(prompt), self._max_context_tokens)
        if len(self._requests) >= self._config.max_requests:
            raise BusyError(
                f"{len(self._requests)} requests are running or waiting, the most that are "
                "accepted (--max-requests): try again later"
            )
        new_tokens = room if max_new_tokens is None else min(max_new_tokens, room)
        entry = _Request(
            request, list(prompt), len(prompt), len(prompt) + new_tokens, wants_all_logits
        )
        self._requests[request] = entry
        self._waiting.append(entry)
        return new_tokens

    def plan(self) -> Chunk | None:
        """Return the next chunk, scheduled from now on, or None when nothing can start."""
        self._admit()
        for _ in range(len(self._running)):
            request = self._running[0]
            self._running.rotate(-1)
            if request.scheduled < len(request.known) and not (request.finished or request.held):
                return self._make_chunk(request)
        return None

    def commit(self, chunk: Chunk) -> tuple[RequestId, ...]:
        """Count a chunk as computed; return its requests that now need their next token.

        A request that finished meanwhile gives its blocks back here and is not returned.
        """
        caught_up = []
        for segment in chunk.segments:
            request = self._requests.get(segment.request)
            if request is None:
                continue
            request.in_flight.discard(chunk.id)
            request.computed += segment.length
            if request.finished:
                self._retire(request)
            elif request.computed == len(request.known):
                caught_up.append(request.id)
        return tuple(caught_up)

    def append(self, request: RequestId, token_id: int) -> None:
        """Add a sampled token to a running request."""
        entry = self._requests[request]
        assert len(entry.known) < entry.max_total_tokens, f"request {request} grew past its blocks"
        entry.known.append(token_id)

    def finish(self, request: RequestId) -> bool:
        """End a request, for whatever reason; False when it is not known (any more).

        No more chunks of it start. Its blocks are free at once, or when its chunks in flight return.
        """
        entry = self._requests.get(request)
        if entry is None or entry.finished:
            return False
        entry.finished = True
        if entry in self._waiting:
            self._waiting.remove(entry)
        self._retire(entry)
        return True

    def hold(self, request: RequestId) -> None:
        """Start no new chunk of a request until `resume`: its reader has enough to read."""
        if request in self._requests:
            self._requests[request].held = True

    def resume(self, request: RequestId) -> None:
        """Undo `hold`."""
        if request in self._requests:
            self._requests[request].held = False

    def num_output_tokens(self, request: RequestId) -> int:
        """Return how many tokens of the answer are known."""
        entry = self._requests[request]
        return len(entry.known) - entry.num_prompt_tokens

    def check_integrity(self) -> None:
        """Assert that blocks, queues and requests agree."""
        self._allocator.check_integrity()
        held = [block for request in self._requests.values() for block in request.blocks]
        assert len(held) == len(set(held)), "two requests hold one block"
        taken = self._allocator.num_blocks - self._allocator.num_free
        assert len(held) == taken, "blocks are taken that no request holds"
        queued = {request.id for request in (*self._waiting, *self._running)}
        live = {request.id for request in self._requests.values() if not request.finished}
        assert live <= queued, "a request is in no queue"
        for request in self._requests.values():
            assert request.computed <= request.scheduled <= len(request.known)

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            num_blocks = self._allocator.blocks_for(request.max_total_tokens)
            blocks = self._allocator.allocate(num_blocks)
            if blocks is None:
                return
            request.blocks = blocks
            self._running.append(self._waiting.popleft())

    def _make_chunk(self, request: _Request) -> Chunk:
        start = request.scheduled
        is_prompt = start < request.num_prompt_tokens
        end = min(
            start + self._config.prefill_chunk_tokens,
            request.num_prompt_tokens if is_prompt else len(request.known),
        )
        positions = np.arange(start, end, dtype=np.int32)
        block_tokens = self._allocator.block_tokens
        table = np.array(request.blocks[: self._allocator.blocks_for(end)], np.int32)
        # Only the last known token's logits are sampled from, unless every one was asked for.
        num_rows = end - start if request.wants_all_logits else int(end == len(request.known))
        chunk = Chunk(
            id=ChunkId(self._next_chunk),
            segments=(
                Segment(
                    request.id,
                    0,
                    end - start,
                    SegmentKind.PROMPT if is_prompt else SegmentKind.DECODE,
                    table,
                ),
            ),
            token_ids=np.array(request.known[start:end], np.int32),
            positions=positions,
            kv_slots=table[positions // block_tokens] * block_tokens + positions % block_tokens,
            logits_rows=np.arange(end - start - num_rows, end - start, dtype=np.int32),
        )
        self._next_chunk += 1
        request.scheduled = end
        request.in_flight.add(chunk.id)
        return chunk

    def _retire(self, request: _Request) -> None:
        if request.in_flight:
            return
        if request.blocks:
            self._allocator.release(request.blocks)
            request.blocks = ()
        if request in self._running:
            self._running.remove(request)
        del self._requests[request.id]
