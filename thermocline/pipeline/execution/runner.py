"""Starts chunks and hands out their results. A stage's failure becomes one StageError and fails its chunk alone.

Knows neither the scheduler nor how a chunk is executed: the policy decides, an executor does it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from thermocline.errors import StageError
from thermocline.messages import Chunk, Hidden, Joined, LayerSum, LayerWork, PartialSum, StepResult
from thermocline.pipeline.execution.chunk_order import ChunkOrder
from thermocline.pipeline.execution.chunks_in_flight import ChunksInFlight
from thermocline.pipeline.execution.executor import Passage, StageFailedError
from thermocline.pipeline.execution.fused import FusedExecutor
from thermocline.pipeline.execution.graph import RESULTS
from thermocline.pipeline.execution.policy import (
    Execution,
    FusedLayer,
    FusedModel,
    FusedStep,
    Load,
    Overlapped,
    Sequential,
    YieldPer,
    choose,
)
from thermocline.pipeline.execution.queues import Channel
from thermocline.pipeline.execution.ring import Ring, RingExecutor
from thermocline.workers.lane_queue import Waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from thermocline.messages import ChunkId, LayerIndex, RequestId, StageMessage
    from thermocline.pipeline.execution.executor import Executor, Steps
    from thermocline.pipeline.execution.graph import Graph
    from thermocline.pipeline.execution.queues import ChannelStatistics
    from thermocline.stages.contract import Stage
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.completion import AnyFuture


class ChunkLane(Protocol):
    """Where chunks are driven: the lane on which most of their jobs run."""

    def drive(self, steps: Steps, chunk: Chunk) -> Awaitable[StepResult]:
        """Begin to take a chunk through its steps; where it stops, others may have their turn."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """Takes the place of a StepResult when a stage failed."""

    chunk: Chunk
    error: StageError


@dataclass(frozen=True, slots=True)
class FusedStages:
    """Stages that take Hidden through a layer, or through all of them. None: there is no such kernel.

    num_layers: of the model. step: of decode steps on the CPU. model: of chunks whose experts a device has; streamed: of
    prompts for which it gets them. shared: of decode steps whose experts a device and the CPU share.
    """

    num_layers: int
    layer: Stage[Hidden, Hidden] | None = None
    step: Stage[Hidden, Hidden] | None = None
    model: Stage[Hidden, Hidden] | None = None
    streamed: Stage[Hidden, Hidden] | None = None
    shared: Stage[Hidden, Hidden] | None = None


NOT_FUSED = FusedStages(0)


class Runner:
    """Runs a validated graph: `inject` chunks, `receive` one result for each, `close` at the end."""

    def __init__(
        self,
        graph: Graph,
        recorder: Recorder,
        lane: ChunkLane,
        load: Callable[[Chunk], Load] = lambda chunk: Load(other_lanes_have_work=True),
        fused: FusedStages = NOT_FUSED,
        *,
        before_start: Callable[[], AnyFuture | None] = lambda: None,
        on_end: Callable[[ChunkId], None] = lambda chunk: None,
    ) -> None:
        """load: what is true now of a chunk; asked on the lane's thread, when the chunk starts.

        before_start: returns what a chunk must wait for before its first stage, then to ask again; None where it may
        start. on_end: called when the chunk has ended, or failed. Both on that thread.
        """
        graph.validate()
        self._lane = lane
        self._load = load
        self._before_start = before_start
        self._on_end = on_end
        self._ring = Ring(graph, recorder)
        self._order = ChunkOrder()
        self._in_flight = ChunksInFlight(graph.credits)
        self._num_layers = fused.num_layers
        self._executors = _executors(
            graph, self._ring, fused, Passage(self._order, self._in_flight)
        )
        self._results = Channel[StepResult | ChunkFailed | BaseException](
            RESULTS, graph.credits, recorder
        )

    def __repr__(self) -> str:
        return f"Runner({len(self._in_flight)} of {self._in_flight.credits} chunks in flight)"

    @property
    def has_credit(self) -> bool:
        """Whether one more chunk may start."""
        return self._in_flight.has_credit

    @property
    def num_in_flight(self) -> int:
        """Chunks that were injected and not received yet."""
        return len(self._in_flight)

    def statistics(self) -> tuple[ChannelStatistics, ...]:
        """Return every channel's counters."""
        return (*self._ring.statistics(), self._results.statistics())

    def execution_now(self, chunk: Chunk) -> Execution:
        """Return how a chunk would be executed if it started now. From any thread."""
        return choose(chunk, self._load(chunk))

    def share_done(self, chunk: Chunk) -> float:
        """Return how much of a chunk's layers is behind it, 0 to 1; 0 where all layers are one job. From any thread."""
        num_behind = max(
            0, self._order.num_attended(chunk) - 1
        )  # the experts of the last may be under way
        return num_behind / self._num_layers if self._num_layers else 0.0

    def inject(self, chunk: Chunk, *, is_beside_answers: bool = False) -> None:
        """Start a chunk; the caller has seen `has_credit`. is_beside_answers: others wait for tokens."""
        self._in_flight.begin(chunk)
        self._order.begin(chunk)
        steps = self._steps(chunk, is_beside_answers=is_beside_answers)
        driven = asyncio.ensure_future(self._lane.drive(steps, chunk))
        driven.add_done_callback(partial(self._take, chunk))

    async def receive(self) -> StepResult | ChunkFailed:
        """Return the next chunk's end, and its credit. Raises ChannelClosed after `close`, and what is our bug."""
        result = await self._results.receive()
        if isinstance(result, BaseException):
            raise result
        self._in_flight.end(result.chunk)
        return result

    def abandon(self, request: RequestId) -> None:
        """Let chunks in flight that only this request wanted come to nothing, as soon as can be."""
        self._in_flight.abandon(request)

    def close(self) -> None:
        """Take no more chunks. More calls do nothing."""
        self._results.close()

    def check_integrity(self) -> None:
        """Assert that nothing is left of chunks that ended."""
        self._in_flight.check_integrity()
        if self.num_in_flight:
            return
        for statistics in self.statistics():
            assert statistics.current_depth == 0, f"{statistics.name} is not empty when idle"
        assert not self._order, "a chunk that ended is still in line"

    def _steps(self, chunk: Chunk, *, is_beside_answers: bool) -> Steps:
        """On the lane's thread: the chunk's execution, and its end behind those in front."""
        try:
            while blocker := self._before_start():
                yield Waits((blocker,), needs_lane=True)
            load = replace(self._load(chunk), is_beside_answers=is_beside_answers)
            result = yield from self._executors[choose(chunk, load)].run(chunk)
            while in_front := self._order.before_end(chunk):
                yield Waits((in_front,), needs_lane=True)
            return result
        finally:
            self._order.end(chunk)
            self._on_end(chunk.id)

    def _take(self, chunk: Chunk, driven: asyncio.Future[StepResult]) -> None:
        if driven.cancelled():
            return
        error = driven.exception()
        if error is None:
            result: StepResult | ChunkFailed | BaseException = driven.result()
        elif isinstance(error, StageFailedError):
            result = ChunkFailed(chunk, _stage_error(chunk, error))
        else:
            result = error
        self._results.put(result)


def _executors(
    graph: Graph, ring: Ring, fused: FusedStages, passage: Passage
) -> Mapping[Execution, Executor]:
    """Return an executor for each execution that the policy may choose."""
    executors: dict[Execution, Executor] = {
        way: RingExecutor(
            passage, ring, overlaps=isinstance(way, Overlapped), yield_per=way.yield_per
        )
        for way in (Overlapped(), Sequential(YieldPer.LAYER), Sequential(YieldPer.STAGE))
    }
    layers = range(fused.num_layers)
    if fused.layer is not None:
        executors[FusedLayer()] = FusedExecutor(passage, graph.stages, fused.layer, layers)
    whole = (
        (FusedStep(), fused.step),
        (FusedModel(), fused.model),
        (FusedModel(streams=True), fused.streamed),
        (FusedModel(with_cpu=True), fused.shared),
    )
    for way, stage in whole:
        if stage is not None:
            executors[way] = FusedExecutor(passage, graph.stages, stage, layers[-1:])
    return executors


def _stage_error(chunk: Chunk, failed: StageFailedError) -> StageError:
    error = StageError(
        failed.stage,
        layer=layer_of(failed.message),
        chunk=chunk.id,
        requests=tuple(chunk.requests),
        why=f"{type(failed.failure).__name__}: {failed.failure}",
    )
    error.__cause__ = failed.failure
    return error


def layer_of(message: StageMessage) -> LayerIndex | None:
    """Return the layer that a message belongs to; None before the first and after the last."""
    match message:
        case Hidden() | LayerWork() | PartialSum() | LayerSum():
            return message.layer
        case Joined():
            return message.work.layer
        case Chunk() | StepResult():
            return None
