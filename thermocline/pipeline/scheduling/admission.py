"""Decides which requests run: admission, growth by further blocks, preemption.

Owns the queues and the status of every request. Knows neither chunks nor turns. A request is more
important than another if its priority value is lower or, with equal priority, if it arrived earlier.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from thermocline.pipeline.scheduling.request import RequestStatus
from thermocline.pipeline.scheduling.room_ahead import Expected, peak_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_blocks import RequestBlocks

_RANK = attrgetter("rank")
# Weight of the newest answer in the moving average of their lengths.
_NEWEST: Final = 0.1


class Admission:
    """Admits a request when there is room for all until its end, and preempts it when a more important one needs its
    blocks.

    An answer is expected to have average length. A request without room waits at its start, where that costs
    nothing. Within its answer it would be computed again after the wait, and its reader would notice.

    A preempted request waits again, with nothing computed. No deadlock: the most important request can get
    every block. No livelock: a preempted request keeps the tokens of its answer, so every admission can
    add to them.
    """

    def __init__(self, blocks: RequestBlocks, expected_answer_tokens: int) -> None:
        """expected_answer_tokens: length of an answer before any has ended; 0 expects nothing, ever."""
        self._blocks = blocks
        self._answer_tokens = float(expected_answer_tokens)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._draining: list[Request] = []
        """Preempted or finished, with chunks in flight that still use their blocks."""
        self.total_preemptions = 0
        """How often a running request was preempted."""

    def __repr__(self) -> str:
        return f"Admission({len(self._running)} running, {len(self._waiting)} waiting)"

    @property
    def running(self) -> Sequence[Request]:
        """The requests that may get chunks, the most important first; a live view."""
        return self._running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._waiting)

    def enqueue(self, request: Request) -> None:
        """Let a request wait for admission."""
        request.status = RequestStatus.WAITING
        insort(self._waiting, request, key=_RANK)

    def admit(self) -> Sequence[Request]:
        """Admit waiting requests by importance until one does not fit; return the admitted ones."""
        if not self._waiting:
            return ()
        admitted = []
        for request in tuple(self._waiting):
            if request.held or request.cache.is_returning:
                continue
            prefix = self._make_it_fit(request)
            if prefix is None:
                break
            if self._blocks.bring_back(request, len(prefix)):
                continue
            self._waiting.remove(request)
            self._blocks.acquire(request, prefix)
            request.status = RequestStatus.RUNNING
            insort(self._running, request, key=_RANK)
            admitted.append(request)
        return admitted

    def grow(self, request: Request, end: int) -> int:
        """Give a request blocks for tokens up to `end`; return up to which token it has blocks.

        Others are preempted only if it could not compute a single token without that.
        """
        block_tokens = self._blocks.block_tokens
        while (capacity := len(request.cache.blocks) * block_tokens) < end:
            if self._blocks.extend(request):
                continue
            if capacity > request.scheduled or not self._preempt_below(request):
                return capacity
        return end

    def finish(self, request: Request) -> bool:
        """End a request; False when its chunks in flight keep its blocks until `chunk_returned`."""
        if self._answer_tokens and request.num_answer_tokens:
            self._answer_tokens += (request.num_answer_tokens - self._answer_tokens) * _NEWEST
        before, request.status = request.status, RequestStatus.FINISHED
        if before is RequestStatus.WAITING:
            self._waiting.remove(request)
            return True
        return before is RequestStatus.RUNNING and self._stop(request)

    def chunk_returned(self, request: Request) -> bool:
        """Note that a chunk of a request is back; True when it was the last one of a finished request."""
        if request.status is RequestStatus.RUNNING or request.in_flight:
            return False
        self._draining.remove(request)
        self._release(request)
        return request.status is RequestStatus.FINISHED

    def check_integrity(self) -> None:
        """Assert that every request is in one queue, and that queues and blocks agree."""
        for queue, status in (
            (self._waiting, RequestStatus.WAITING),
            (self._running, RequestStatus.RUNNING),
        ):
            assert queue == sorted(queue, key=_RANK), "a queue is out of order"
            assert all(request.status is status for request in queue), "a queue has another status"
        for request in self._waiting:
            assert not request.cache.blocks, "a waiting request has blocks"
            assert not request.in_flight, "a waiting request has chunks in flight"
        for request in self._draining:
            assert request.in_flight, "a request keeps its blocks without a chunk in flight"
            assert request.status in {RequestStatus.PREEMPTED, RequestStatus.FINISHED}
        everybody = (*self._waiting, *self._running, *self._draining)
        assert len(everybody) == len(set(everybody)), "a request is in two queues"
        self._blocks.check_integrity(everybody)

    def _make_it_fit(self, request: Request) -> list[int] | None:
        """Return the prefix to share if the request fits, if need be after preempting others."""
        # One that waits for its prefix to come back has its place kept.
        returning = (other for other in self._waiting if other.cache.is_returning)
        above = [other for other in (*self._running, *returning) if other.rank < request.rank]
        block_tokens = self._blocks.block_tokens
        peak = peak_blocks(map(self._expected, (*above, request)), block_tokens)
        further = peak - sum(map(self._blocks.num_held, above))
        can_fit = (
            peak <= self._blocks.num_blocks
            and self._blocks.windows_fit((*above, request))
            and self._blocks.states_fit(len(above) + 1)
        )
        while True:
            prefix = self._blocks.find_prefix(request)
            has_blocks = self._blocks.num_missing(further, prefix) <= 0
            has_room = self._blocks.has_state and self._blocks.windows_fit(
                (*self._running, request)
            )
            if has_blocks and has_room:
                return prefix
            if not can_fit or not self._preempt_below(request):
                return None

    def _expected(self, request: Request) -> Expected:
        """Return how far a request is taken to get: at least one block further, at most as far as it may."""
        average = int(self._answer_tokens)
        further = max(average - request.num_answer_tokens, average // 4, self._blocks.block_tokens)
        num_tokens = len(request.known)
        return Expected(
            num_tokens,
            min(further, request.max_total_tokens - num_tokens),
            request.cache.num_matched if request.is_admitted else 0,
        )

    def _preempt_below(self, request: Request) -> bool:
        """Preempt the least important request below this one; False if no block came free now."""
        if self._draining:
            return False  # blocks come free when chunks in flight return
        victim = next((other for other in reversed(self._running) if other.cache.blocks), None)
        if victim is None or victim.rank <= request.rank:
            return False
        self.total_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        return self._stop(victim)

    def _stop(self, request: Request) -> bool:
        """Take a request out of the running ones; False when its chunks in flight keep its blocks."""
        self._running.remove(request)
        if request.in_flight:
            self._draining.append(request)
            return False
        self._release(request)
        return True

    def _release(self, request: Request) -> None:
        self._blocks.release(request)
        if request.status is RequestStatus.PREEMPTED:
            self.enqueue(request)
