"""Runs the chunks of several replicas in common steps: rank 0's side of a model over several ranks.

Each replica has a step loop of its own, whose runner hands chunks to the conductor. The conductor makes steps of what
there is, tells every rank, and gives results back. After a loss it repeats what was lost, or has it moved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import GroupLostError, StageError
from thermocline.parallel.parts import is_divided
from thermocline.parallel.rank import MAX_ROUNDS
from thermocline.parallel.step_header import HeaderKind, StepHeader, step_of
from thermocline.pipeline.execution.queues import ChannelClosed
from thermocline.pipeline.execution.rank_results import all_results, expected_bytes
from thermocline.pipeline.execution.runner import ChunkFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thermocline.experts.dispatch.offload_selector import OffloadSelector
    from thermocline.messages import Chunk, RequestId, StepResult
    from thermocline.parallel.rank import RankMember
    from thermocline.pipeline.execution.rank_steps import RankSteps

_LOG: Final = logging.getLogger("thermocline.parallel")

_MAX_ALONE_TOKENS: Final = 32
"""Ranks hear nothing of each other in a step without an exchange, so it must be far shorter than their deadline."""
_MAX_TRIES: Final = 3
"""How often steps with a request may be lost while no rank is: then it is the request's own fault."""


class ReplicaRunner:
    """What a replica's step loop sees as its runner. On the engine's thread alone."""

    def __init__(self, num_credits: int, wake: Callable[[], None]) -> None:
        """wake: tells the conductor that there is a chunk, or no more will come."""
        self.pending: deque[Chunk] = deque()
        """Chunks that no step has yet; the conductor takes them."""
        self.is_closed = False
        self._num_credits = num_credits
        self._wake = wake
        self._num_in_flight = 0
        self._results: asyncio.Queue[StepResult | ChunkFailed | None] = asyncio.Queue()

    def __repr__(self) -> str:
        return f"ReplicaRunner({self._num_in_flight} of {self._num_credits} chunks in flight)"

    @property
    def has_credit(self) -> bool:
        """Whether one more chunk may start."""
        return self._num_in_flight < self._num_credits

    @property
    def num_in_flight(self) -> int:
        """Chunks that were injected and not received yet."""
        return self._num_in_flight

    def share_done(self, chunk: Chunk) -> float:
        """Return 0: how far the ranks are is not told."""
        return 0.0

    def inject(self, chunk: Chunk, *, is_beside_answers: bool = False) -> None:
        """Have the next steps compute a chunk; the caller has seen `has_credit`."""
        self._num_in_flight += 1
        self.pending.append(chunk)
        self._wake()

    async def receive(self) -> StepResult | ChunkFailed:
        """Return the next chunk's end, and its credit. Raises ChannelClosed after `close`."""
        result = await self._results.get()
        if result is None:
            raise ChannelClosed
        self._num_in_flight -= 1
        return result

    def deliver(self, result: StepResult | ChunkFailed) -> None:
        """Give a chunk's end to the step loop."""
        self._results.put_nowait(result)

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Take chunks back that will have no result."""
        self._num_in_flight -= len(chunks)
        gone = {chunk.id for chunk in chunks}
        self.pending = deque(chunk for chunk in self.pending if chunk.id not in gone)

    def abandon(self, request: RequestId) -> None:
        """Nothing: all ranks have the chunk, so it is computed to its end."""

    def close(self) -> None:
        """Take no more chunks. More calls do nothing."""
        if not self.is_closed:
            self.is_closed = True
            self._results.put_nowait(None)
            self._wake()

    def check_integrity(self) -> None:
        """Assert that nothing is left of chunks that ended."""
        assert self._num_in_flight >= len(self.pending), "a chunk waits that nobody injected"


@dataclass(frozen=True, slots=True)
class ConductorRules:
    """How steps are made.

    keeps_results: whether what a lost step has written is written again to the same bits, so that a chunk may be repeated;
    not where states move on. quiet_s: how long rank 0 says nothing when there is nothing to do.
    """

    num_credits: int
    keeps_results: bool
    quiet_s: float
    max_rounds: int = MAX_ROUNDS


class Conductor:
    """Makes steps until every runner is closed.

    sizes: the width of logits, and of hidden states. on_lost: told of chunks that are computed again from their requests'
    tokens: (replica, chunks, whether the replica is gone).
    """

    def __init__(
        self,
        member: RankMember,
        steps: RankSteps,
        sizes: tuple[int, int],
        rules: ConductorRules,
        ways: OffloadSelector | None = None,
    ) -> None:
        """ways: decides by measured times whether a step's experts are exchanged; None where they always are."""
        self._member, self._steps, self._sizes = member, steps, sizes
        self._rules, self._ways = rules, ways
        self._news = asyncio.Event()
        self.runners = tuple(
            ReplicaRunner(rules.num_credits, self._news.set) for _ in member.mesh.replicas
        )
        self.on_lost: Callable[[int, list[Chunk], bool], None] = _nobody_moves
        # Of each request: how many steps with it were lost, and up to which position the last one was to get.
        self._tries: dict[tuple[int, RequestId], tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"Conductor({self._member}, {len(self.runners)} replicas)"

    async def run(self) -> None:
        """Run steps until every runner is closed, then end the service on all ranks. Raises MeshEndedError."""
        while not all(runner.is_closed for runner in self.runners):
            self._news.clear()
            header = self._next()
            if header.kind is HeaderKind.ALIVE and not await self._is_quiet():
                continue
            await self._step(header)
        try:
            await self._member.tell(StepHeader(HeaderKind.END))
        except GroupLostError:
            _LOG.info("a rank was lost before the end")

    async def _is_quiet(self) -> bool:
        """Wait for news; whether there were none for so long that the others want to hear from rank 0."""
        try:
            await asyncio.wait_for(self._news.wait(), self._rules.quiet_s)
        except TimeoutError:
            return True
        return False

    def _next(self) -> StepHeader:
        """Return the next step of the chunks that wait, or ALIVE where there are none."""
        rounds = []
        for number in range(self._rules.max_rounds):
            chunks = tuple(
                runner.pending[number] if number < len(runner.pending) else None
                for runner in self.runners
            )
            if any(chunk is not None for chunk in chunks):
                rounds.append(chunks)
        if not rounds:
            return StepHeader(HeaderKind.ALIVE)
        header = step_of(rounds, [self._divided(chunks) for chunks in rounds])
        return step_of(rounds, is_alone=True) if self._may_be_alone(header) else header

    def _divided(self, chunks: tuple[Chunk | None, ...]) -> tuple[bool, ...]:
        """Return of which replicas' chunks the ranks each compute some rows."""
        member = self._member
        return tuple(
            chunk is not None and member.may_divide and is_divided(chunk, len(ranks))
            for chunk, ranks in zip(chunks, member.mesh.replicas, strict=True)
        )

    def _may_be_alone(self, header: StepHeader) -> bool:
        """Whether ranks compute all experts of their own tokens, as that was faster lately."""
        most = max(header.most_tokens)
        return (
            self._ways is not None and most <= _MAX_ALONE_TOKENS and not self._ways.offloads(most)
        )

    def _measure(self, header: StepHeader, seconds: float) -> None:
        if self._ways is None:
            return
        self._ways.observe(max(header.most_tokens), seconds, offloaded=not header.is_alone)
        if header.is_alone and seconds > self._rules.quiet_s:
            _LOG.info("a step without an exchange took %.1f s: from now on all have one", seconds)
            self._ways = None

    async def _step(self, header: StepHeader) -> None:
        begin_s = time.perf_counter()
        try:
            await self._member.tell(header)
            if header.kind is not HeaderKind.STEP:
                return
            mine = await self._steps.run(header)
            theirs = await self._member.results(
                b"", expected_bytes(header, self._member.mesh, self._sizes)
            )
        except GroupLostError as error:
            await self._recover(header, error)
            return
        self._measure(header, time.perf_counter() - begin_s)
        found = all_results(header, self._member.mesh, mine, theirs, self._sizes)
        for replica, result in found:
            runner = self.runners[replica]
            runner.pending.popleft()
            self._note_success(replica, result.chunk)
            runner.deliver(result)

    async def _recover(self, header: StepHeader, error: GroupLostError) -> None:
        """Form a new group, and see to what the lost step had."""
        before = self._member.mesh.live_replicas
        lost = await self._member.regroup()
        if lost:
            _LOG.warning(
                "rank %s was lost (%s); %d ranks go on and compute its experts",
                ", ".join(map(str, lost)),
                error,
                self._member.mesh.size,
            )
        else:
            _LOG.warning("a step was lost (%s); all ranks are still there", error)
        for replica in before:
            runner = self.runners[replica]
            active = [chunk for chunks in header.rounds if (chunk := chunks[replica]) is not None]
            if not self._member.mesh.replicas[replica]:
                chunks = list(runner.pending)
                runner.forget(chunks)
                self.on_lost(replica, chunks, True)
                continue
            failed = (
                [] if lost else [chunk for chunk in active if self._is_hopeless(replica, chunk)]
            )
            for chunk in failed:
                runner.pending.remove(chunk)
                runner.deliver(ChunkFailed(chunk, _stage_error(chunk, error)))
            repeated = [chunk for chunk in active if chunk not in failed]
            if repeated and not self._rules.keeps_results:
                # Later chunks of these requests go on from states that are lost.
                chunks = list(runner.pending)
                runner.forget(chunks)
                self.on_lost(replica, chunks, False)

    def _is_hopeless(self, replica: int, chunk: Chunk) -> bool:
        """Whether a chunk that was lost has a request with which too many steps were lost.

        Requests count, not chunks: what was lost may come again in another chunk, with others or behind earlier tokens.
        """
        most = 0
        for request, end in _ends(chunk):
            tries, _ = self._tries.get((replica, request), (0, 0))
            self._tries[replica, request] = tries + 1, end
            most = max(most, tries + 1)
        if most >= _MAX_TRIES:
            for request, _ in _ends(chunk):
                self._tries.pop((replica, request), None)
        return most >= _MAX_TRIES

    def _note_success(self, replica: int, chunk: Chunk) -> None:
        """Forget the losses of requests that got as far as the step that was lost."""
        for request, end in _ends(chunk):
            _, wanted = self._tries.get((replica, request), (0, 0))
            if end >= wanted:
                self._tries.pop((replica, request), None)


def _ends(chunk: Chunk) -> Iterator[tuple[RequestId, int]]:
    """Yield a chunk's requests, each with the position behind its last token."""
    for segment in chunk.segments:
        yield segment.request, int(chunk.positions[segment.start]) + segment.length


def _stage_error(chunk: Chunk, error: GroupLostError) -> StageError:
    return StageError(
        "exchange",
        layer=None,
        chunk=chunk.id,
        requests=tuple(chunk.requests),
        why=f"{error.__cause__ or error}",
    )


def _nobody_moves(replica: int, chunks: list[Chunk], is_gone: bool) -> None:
    raise AssertionError("the conductor was not told who moves requests")
