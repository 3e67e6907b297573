"""Gives a graph life: one task per stage, one channel per stage's input, one loop for all of them.

A stage's exception becomes one StageError and fails its chunk; the ring goes on. Draws no busy span
itself: awaiting is not work. Knows no scheduler.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from thermocline.errors import StageError
from thermocline.messages import (
    Chunk,
    Hidden,
    Joined,
    LayerSum,
    LayerWork,
    PartialSum,
    StageMessage,
    StepResult,
)
from thermocline.pipeline.channel import Channel, ChannelClosed
from thermocline.pipeline.graph import RESULTS
from thermocline.pipeline.join import Join
from thermocline.pipeline.walk import Walk, WalkError
from thermocline.pipeline.walk_order import WalkOrder

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Mapping

    from thermocline.messages import ChunkId, LayerIndex, RequestId
    from thermocline.pipeline.channel import ChannelStatistics
    from thermocline.pipeline.graph import Edge, Graph
    from thermocline.stages.contract import AnyStage
    from thermocline.traces.recorder import Recorder


class WalkLane(Protocol):
    """Where chunks walk: the lane on which most of their jobs run."""

    async def walk(self, turns: Generator[None, None, StepResult], chunk: Chunk) -> StepResult:
        """Run a whole walk; where it yields, others have their turn."""
        ...


class AbandonedError(Exception):
    """Nobody waits for the chunk any more."""


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """Takes the place of a StepResult when a stage failed."""

    chunk: Chunk
    error: StageError


@dataclass(frozen=True, slots=True)
class _Node:
    """A stage with its input and where its output goes."""

    name: str
    stage: AnyStage
    input: Channel[StageMessage]
    join: Join | None
    is_ordered: bool
    is_counted: bool
    """Whether a chunk's messages to it are waited for; nobody waits for hints."""
    outgoing: tuple[tuple[Edge, Channel[StageMessage]], ...]

    @classmethod
    def of(cls, graph: Graph, name: str, inputs: Mapping[str, Channel[StageMessage]]) -> _Node:
        return cls(
            name,
            graph.stages[name],
            inputs[name],
            Join() if name in graph.joins else None,
            name in graph.ordered,
            not any(edge.lossy for edge in graph.edges if edge.target == name),
            tuple(
                (edge, inputs[edge.target])
                for edge in graph.outgoing(name)
                if edge.target != RESULTS
            ),
        )


class Runner:
    """Runs a validated graph. `inject` chunks, `receive` one result for each, `close` at the end.

    walk_lane: where decode steps walk, and prompts too where the ring gives them nothing; without one all go
    through the ring.
    overlap: False lets one stage work at a time, for comparison.
    """

    def __init__(
        self,
        graph: Graph,
        recorder: Recorder,
        walk_lane: WalkLane | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        graph.validate()
        self._graph = graph
        inputs = {
            name: Channel[StageMessage](name, graph.capacity(name), recorder)
            for name in graph.stages
        }
        self._results = Channel[StepResult | ChunkFailed](RESULTS, graph.credits, recorder)
        self._nodes = {name: _Node.of(graph, name, inputs) for name in graph.stages}
        self._walk = Walk(graph, overlap=overlap)
        self._alone = None if overlap else asyncio.Lock()
        self._walk_lane = walk_lane
        self._group: asyncio.TaskGroup | None = None
        # To walk as soon as there is a group.
        self._early: deque[Coroutine[Any, Any, None]] = deque()
        self._order = WalkOrder()
        # Whether prompts walk, all of them: one in the ring would be overtaken by a later one that walks.
        self._prompts_walk = graph.is_line
        self._num_prompts = 0
        # Messages of each chunk that are in a channel or at a stage. One that failed keeps its credit until they are gone:
        # no channel ever has to hold those of more chunks than there are credits.
        self._num_messages: Counter[ChunkId] = Counter()
        self._failed: dict[ChunkId, ChunkFailed] = {}
        self._in_flight: set[ChunkId] = set()
        self._without_result: set[ChunkId] = set()  # those of them whose end is not known yet
        self._num_in_flight: Counter[RequestId] = Counter()  # chunks with tokens of a request
        self._abandoned: set[RequestId] = set()
        # The last of them that reached each layer.
        self._latest: defaultdict[RequestId, dict[LayerIndex, ChunkId]] = defaultdict(dict)

    def __repr__(self) -> str:
        return f"Runner({len(self._in_flight)} of {self._graph.credits} chunks in flight)"

    @property
    def has_credit(self) -> bool:
        """Whether one more chunk may start."""
        return len(self._in_flight) < self._graph.credits

    @property
    def num_in_flight(self) -> int:
        """Chunks that were injected and not received yet."""
        return len(self._in_flight)

    def statistics(self) -> tuple[ChannelStatistics, ...]:
        """Return every channel's counters."""
        return (
            *(node.input.statistics() for node in self._nodes.values()),
            self._results.statistics(),
        )

    def inject(self, chunk: Chunk, *, in_parts: bool = False) -> None:
        """Start a chunk; the caller has seen `has_credit`.

        in_parts: a prompt that walks gives its lane back after each stage instead of after each layer.
        """
        assert self.has_credit, "no credit left for one more chunk"
        self._in_flight.add(chunk.id)
        self._without_result.add(chunk.id)
        self._num_in_flight.update(chunk.requests)
        if chunk.is_prompt:
            if not self._num_prompts:
                self._prompts_walk = self._graph.gains_nothing(chunk)
            self._num_prompts += 1
        if self._walk_lane is not None and (self._prompts_walk or not chunk.is_prompt):
            self._order.begin(chunk)
            walk = self._walk_chunk(chunk, self._walk_lane, in_parts=in_parts)
            if self._group is None:
                self._early.append(walk)
            else:
                self._group.create_task(walk, name="walk")
            return
        self._put(self._nodes[self._graph.source], chunk)

    async def receive(self) -> StepResult | ChunkFailed:
        """Return the next chunk's end, and its credit. Raises ChannelClosed after `close`."""
        result = await self._results.receive()
        self._in_flight.discard(result.chunk.id)
        self._num_prompts -= result.chunk.is_prompt
        for request in result.chunk.requests:
            self._num_in_flight[request] -= 1
            if not self._num_in_flight[request]:
                del self._num_in_flight[request]
                self._latest.pop(request, None)
                self._abandoned.discard(request)
        return result

    def abandon(self, request: RequestId) -> None:
        """Let chunks in flight that only this request wanted come to nothing, as soon as can be."""
        if request in self._num_in_flight:
            self._abandoned.add(request)

    async def run(self) -> None:
        """Run all stages until `close`."""
        async with asyncio.TaskGroup() as self._group:
            for node in self._nodes.values():
                self._group.create_task(self._run_node(node), name=f"stage {node.name}")
            while self._early:
                self._group.create_task(self._early.popleft(), name="walk")
        self._group = None

    def close(self) -> None:
        """End `run` once the stages have finished their present message."""
        for node in self._nodes.values():
            node.input.close()
        self._results.close()

    def check_integrity(self) -> None:
        """Assert that an idle ring is empty and that no ring send ever waited."""
        for statistics in self.statistics():
            assert statistics.send_waits == 0, f"a send into {statistics.name} waited"
            if not self._in_flight:
                assert statistics.current_depth == 0, f"{statistics.name} is not empty when idle"
        if not self._in_flight:
            assert not any(node.join for node in self._nodes.values()), "a join is not empty"
            assert not self._num_in_flight, "a request's chunks were not all counted back"
            assert not self._latest, "the order of an ended request is remembered"
            assert not self._abandoned, "an abandoned request is remembered"
            assert not self._failed, "a failed chunk is remembered"
            assert not self._order, "a walk that ended is still in line"

    async def _walk_chunk(self, chunk: Chunk, lane: WalkLane, *, in_parts: bool) -> None:
        try:
            result = await lane.walk(self._turns(chunk, in_parts=in_parts), chunk)
        except WalkError as error:
            self._fail(error.stage, error.message, chunk, error.failure)
        else:
            await self._succeed(result)

    def _turns(self, chunk: Chunk, *, in_parts: bool) -> Generator[None, None, StepResult]:
        """On the lane's thread: the chunk's walk, as far as somebody waits for it, behind the one in front."""
        turns = self._walk.turns(chunk, in_parts=in_parts)
        ahead: LayerIndex | None = None
        try:
            while self._is_wanted(chunk):
                if ahead is None or self._order.may_enter(chunk, ahead):
                    entered, ahead = ahead, next(turns)
                    if entered is not None:
                        self._order.attended(chunk, entered)
                yield
        except StopIteration as done:
            while not self._order.is_first(chunk):
                yield
            result: StepResult = done.value
            return result
        finally:
            turns.close()
            self._order.end(chunk)
        raise WalkError("walk", chunk, AbandonedError())

    def _is_wanted(self, chunk: Chunk) -> bool:
        return not self._abandoned or not self._abandoned.issuperset(chunk.requests)

    async def _run_node(self, node: _Node) -> None:
        try:
            while True:
                message = await node.input.receive()
                await self._take(node, message)
                if node.is_counted:
                    self._num_messages[message.chunk.id] -= 1
                    self._end_if_gone(message.chunk.id)
        except ChannelClosed:
            return

    async def _take(self, node: _Node, message: StageMessage) -> None:
        if message.chunk.id in self._failed:
            self._graph.drop(node.name, message)
        elif not self._is_wanted(message.chunk):
            self._graph.drop(node.name, message)
            self._fail(node.name, message, message.chunk, AbandonedError())
        elif node.join is None or isinstance(message, Joined):
            await self._run_message(node, message)
        else:
            assert isinstance(message, LayerWork | PartialSum | LayerSum)
            for complete in node.join.add(message):
                await self._run_message(node, complete)

    async def _run_message(self, node: _Node, message: StageMessage) -> None:
        if node.is_ordered:
            assert isinstance(message, Hidden)
            self._check_order(message)
        try:
            if self._alone is None:
                output = await node.stage(message)
            else:
                async with self._alone:
                    output = await node.stage(message)
        except Exception as error:  # noqa: BLE001 - the one place where a stage's failure is caught
            self._fail(node.name, message, message.chunk, error)
            return
        if isinstance(output, StepResult):
            await self._succeed(output)
        elif output is not None:
            await self._pass_on(node, output)

    async def _pass_on(self, node: _Node, output: StageMessage) -> None:
        is_wanted = output.chunk.id not in self._failed
        for edge, target in node.outgoing:
            if not edge.carries(output):
                continue
            if not is_wanted:
                self._graph.drop(edge.target, output)
            elif edge.lossy:
                target.send_nowait(output)
            else:
                self._num_messages[output.chunk.id] += 1
                if not target.send_nowait(output):
                    await target.send(output)

    def _check_order(self, hidden: Hidden) -> None:
        """Assert that a request's chunks come in order: each reads what the one before it writes."""
        chunk = hidden.chunk
        for request in chunk.requests:
            last = self._latest[request].get(hidden.layer)
            assert last is None or last < chunk.id, f"chunk {chunk.id} came after {last}"
            self._latest[request][hidden.layer] = chunk.id

    async def _succeed(self, result: StepResult) -> None:
        if result.chunk.id in self._without_result:
            self._without_result.discard(result.chunk.id)
            await self._results.send(result)

    def _fail(self, name: str, message: StageMessage, chunk: Chunk, error: Exception) -> None:
        if chunk.id not in self._without_result:
            return  # it has failed already, or only a hint of it was left
        self._without_result.discard(chunk.id)
        wrapped = StageError(
            name,
            layer=layer_of(message),
            chunk=chunk.id,
            requests=tuple(chunk.requests),
            why=f"{type(error).__name__}: {error}",
        )
        wrapped.__cause__ = error
        self._failed[chunk.id] = ChunkFailed(chunk, wrapped)
        for node in self._nodes.values():
            for released in node.join.discard(chunk.id) if node.join else ():
                self._put(node, released)
        self._end_if_gone(chunk.id)

    def _put(self, node: _Node, message: StageMessage) -> None:
        """Send what its channel has room for: the first of a chunk, or what left it before."""
        self._num_messages[message.chunk.id] += 1
        accepted = node.input.send_nowait(message)
        assert accepted, "a channel has room for every credit"

    def _end_if_gone(self, chunk: ChunkId) -> None:
        """Give the credit of a failed chunk back if nothing of it is on its way any more."""
        if self._num_messages[chunk]:
            return
        del self._num_messages[chunk]
        failed = self._failed.pop(chunk, None)
        if failed is not None:
            accepted = self._results.send_nowait(failed)
            assert accepted, "there is room for one result per credit"


def layer_of(message: StageMessage) -> LayerIndex | None:
    """Return the layer that a message belongs to; None before the first and after the last."""
    match message:
        case Hidden() | LayerWork() | PartialSum() | LayerSum():
            return message.layer
        case Joined():
            return message.work.layer
        case Chunk() | StepResult():
            return None
