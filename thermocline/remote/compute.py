"""`ExpertBackend` of workers: sends each its part of a dispatch, and returns their outputs.

Where a worker fails, its part is computed here or is an error, as configured, and the log says so. Where its answer is
later than usual, its part is computed here as well. Outputs are summed later in slot order, so the split does not change
a bit of the result.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import RemoteError, WorkerSlowError
from thermocline.messages import BackendRole, PartialSum
from thermocline.remote.assignment import cut, split_by_worker
from thermocline.remote.requests import ExpertRequest
from thermocline.traces.lanes import Lane, Name
from thermocline.workers.lane import result_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.experts.backends.contract import ExpertBackend
    from thermocline.messages import Chunk, ExpertDispatch, ExpertResult, LayerWork
    from thermocline.remote.assignment import Assignment, WorkerDispatch
    from thermocline.remote.calls import AnswerFuture, ClientStatistics, ExpertAnswer
    from thermocline.remote.client import WorkerClient
    from thermocline.remote.load_balancer import WorkerLoadBalancer
    from thermocline.traces.recorder import Recorder

_LOG: Final = logging.getLogger("thermocline.remote")


@dataclass(frozen=True, slots=True)
class RemoteStatistics:
    """Counters of remote experts. num_experts: by layer; total_choices: pairs that workers computed;
    total_fallbacks: parts of a layer that were computed here, as their worker had failed or was late; total_hedges:
    parts that a worker had been given and were computed here as well, as its answer was later than usual.
    """

    on_failure: str
    num_experts: tuple[int, ...]
    total_choices: int
    total_fallbacks: int
    total_hedges: int
    workers: tuple[ClientStatistics, ...]

    @property
    def failure_means(self) -> str:
        """What a worker's failure leads to, in words."""
        return "computed here" if self.on_failure == "cpu" else "an error"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How work is sent. max_pairs: of one request; falls_back: whether a failed worker's part is computed here instead
    of raising; balancer: decides how much workers get; None sends them all pairs of their experts.
    """

    max_pairs: int
    falls_back: bool
    balancer: WorkerLoadBalancer | None


class RemoteExpertBackend:
    """Experts computed by workers."""

    def __init__(
        self,
        assignment: Assignment,
        clients: Sequence[WorkerClient],
        local: ExpertBackend,
        settings: RemoteSettings,
        recorder: Recorder,
    ) -> None:
        """local: computes what workers do not."""
        self._assignment = assignment
        self._clients = tuple(clients)
        self._local = local
        self._max_pairs = settings.max_pairs
        self._falls_back = settings.falls_back
        self._balancer = settings.balancer
        self._recorder = recorder
        self._num_choices = self._num_fallbacks = self._num_hedges = 0
        self._silent = [False] * len(clients)  # workers whose failure was logged
        self._shown_ns = [0] * len(clients)  # the end of each worker's track

    def __repr__(self) -> str:
        return f"RemoteExpertBackend({len(self._clients)} workers, {self._num_fallbacks} fallbacks)"

    async def compute(self, work: LayerWork, dispatch: ExpertDispatch) -> ExpertResult:
        """See `ExpertBackend.compute`. Raises RemoteError where that was asked for."""
        owner, place = self._assignment.owner[work.layer], self._assignment.place[work.layer]
        parts = split_by_worker(dispatch, owner, place, self._max_pairs)
        remote, local = self._balance(work, parts)
        given_ns = time.perf_counter_ns()
        futures = [self._clients[part.worker].submit(_request(work, part)) for part in remote]
        try:
            # The local parts are computed while the workers compute theirs.
            results = [await self._local.compute(work, part.dispatch) for part in local]
            results += [
                await self._finish(work, part, future, given_ns)
                for part, future in zip(remote, futures, strict=True)
            ]
        finally:
            for future in futures:
                future.cancel()  # no effect on those that ended
        first, *others = results
        if not others:
            return first
        assert isinstance(first, PartialSum), "one of several parts is not the whole layer"
        return replace(first, also=tuple(others))

    def _balance(
        self, work: LayerWork, parts: Iterable[WorkerDispatch]
    ) -> tuple[list[WorkerDispatch], list[WorkerDispatch]]:
        """Return what workers compute, and what is computed here."""
        if self._balancer is None:
            return list(parts), []
        remote, local = [], []
        cold = work.dispatches.get(BackendRole.COLD)
        num_local = 0 if cold is None else len(cold.rows)
        for part in parts:
            number = self._balancer.pairs_for(
                part.worker,
                part.num_pairs,
                num_local,
                is_prompt=work.chunk.is_prompt,
                overlapped_tokens=_overlapped_tokens(work.chunk),
            )
            first, rest = cut(part, number)
            if first is not None:
                remote.append(first)
            if rest is not None:
                local.append(rest)
                num_local += rest.num_pairs
        return remote, local

    def statistics(self) -> RemoteStatistics:
        """Return the counters so far, from any thread."""
        return RemoteStatistics(
            "cpu" if self._falls_back else "error",
            tuple(self._assignment.mask.sum(axis=1).tolist()),
            self._num_choices,
            self._num_fallbacks,
            self._num_hedges,
            tuple(client.statistics() for client in self._clients),
        )

    def close(self) -> None:
        """End the connections, and the workers that were started for this."""
        for client in self._clients:
            client.close()

    async def _finish(
        self, work: LayerWork, part: WorkerDispatch, future: AnswerFuture, given_ns: int
    ) -> ExpertResult:
        try:
            answer = await result_of(future)
        except WorkerSlowError as error:
            return await self._hedge(work, part, error, given_ns)
        except RemoteError as error:
            return await self._fall_back(work, part, error)
        future.count_wait(answer)
        self._silent[part.worker] = False
        self._num_choices += part.num_pairs
        self._measure(work, part, answer)
        self._show(work, part, answer)
        return PartialSum(
            work.chunk,
            work.layer,
            BackendRole.REMOTE,
            part.dispatch.rows,
            part.dispatch.slots,
            answer.values,
        )

    async def _fall_back(
        self, work: LayerWork, part: WorkerDispatch, error: RemoteError
    ) -> ExpertResult:
        """Compute a failed worker's part here, or raise its error, as configured."""
        if not self._silent[part.worker]:  # once, until the worker answers again
            self._silent[part.worker] = True
            what = "its experts are computed here" if self._falls_back else "requests fail"
            _LOG.warning("expert worker %d: %s; %s until it is back", part.worker, error, what)
        if not self._falls_back:
            raise error
        self._num_fallbacks += 1
        return await self._local.compute(work, part.dispatch)

    async def _hedge(
        self, work: LayerWork, part: WorkerDispatch, error: RemoteError, given_ns: int
    ) -> ExpertResult:
        """Compute here what a worker was given and does not answer; its answer is dropped when it comes."""
        self._num_hedges += 1
        _LOG.info("expert worker %d: %s; it gets nothing until it answers", part.worker, error)
        result = await self._local.compute(work, part.dispatch)
        args = {
            "chunk": work.chunk.id,
            "layer": work.layer,
            "pairs": part.num_pairs,
            "worker": part.worker,
        }
        end_ns = time.perf_counter_ns()
        self._recorder.async_span(Name.HEDGE, work.chunk.id, given_ns, end_ns, args)
        return result

    def _measure(self, work: LayerWork, part: WorkerDispatch, answer: ExpertAnswer) -> None:
        if self._balancer is not None:
            compute_s = (answer.end_ns - answer.begin_ns) * 1e-9
            call_s = (answer.taken_ns - answer.given_ns) * 1e-9
            self._balancer.observe_remote(
                part.worker, part.num_pairs, compute_s, call_s, is_prompt=work.chunk.is_prompt
            )

    def _show(self, work: LayerWork, part: WorkerDispatch, answer: ExpertAnswer) -> None:
        """Draw the call, and the worker's compute within it, shifted where its clock is another machine's."""
        if not self._recorder.enabled:
            return
        begin_ns, end_ns = answer.begin_ns, answer.end_ns
        if not answer.sent_ns <= begin_ns <= end_ns <= answer.came_ns:  # another machine's clock
            end_ns = answer.came_ns
            begin_ns = max(end_ns - (answer.end_ns - answer.begin_ns), answer.sent_ns)
        begin_ns = max(begin_ns, self._shown_ns[part.worker])
        args = {
            "chunk": work.chunk.id,
            "tokens": work.chunk.num_tokens,
            "layer": work.layer,
            "experts": len(part.places),
            "pairs": part.num_pairs,
            "worker": part.worker,
            "send_us": (answer.sent_ns - answer.given_ns) // 1000,
            "wait_us": (answer.came_ns - answer.sent_ns) // 1000,
            "receive_us": (answer.taken_ns - answer.came_ns) // 1000,
        }
        recorder, number = self._recorder, part.worker
        recorder.async_span(Name.REMOTE, work.chunk.id, answer.given_ns, answer.taken_ns, args)
        if begin_ns <= end_ns:
            self._shown_ns[number] = end_ns
            recorder.span(Lane.REMOTE, Name.REMOTE, begin_ns, end_ns, args, number)
            recorder.flow(work.chunk.id, Lane.REMOTE, begin_ns, "step", number)


def _overlapped_tokens(chunk: Chunk) -> int:
    """Return the tokens of a neighbouring chunk that is computed meanwhile: chunks of a prompt overlap."""
    has_neighbour = chunk.positions[0] > 0 or not len(chunk.logits_rows)
    return chunk.num_tokens if chunk.is_prompt and has_neighbour else 0


def _request(work: LayerWork, part: WorkerDispatch) -> ExpertRequest:
    rows = part.dispatch.rows
    if len(work.x) == 1:
        tokens, places = np.zeros(1, np.intp), np.zeros(len(rows), np.int32)
    else:
        tokens, inverse = np.unique(rows, return_inverse=True)
        places = inverse.astype(np.int32)
    return ExpertRequest(
        work.layer,
        work.chunk.is_prompt,
        work.x,
        tokens,
        part.places,
        part.dispatch.counts,
        places,
        part.dispatch.weights,
    )
