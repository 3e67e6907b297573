"""Walks one chunk through the graph on the calling thread: stage after stage, without a queue.

The same graph and the same stage objects as in the runner's ring, for chunks that gain nothing from it: a
hop between tasks costs more than some stages of a single token. Runs on a lane's thread, where that lane's
jobs run at once; jobs of other lanes run beside them. Knows no event loop.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from thermocline.messages import Hidden, LayerIndex, LayerSum, LayerWork, PartialSum, StepResult
from thermocline.pipeline.graph import RESULTS
from thermocline.pipeline.join import Join

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Mapping

    from thermocline.messages import Chunk, StageMessage
    from thermocline.pipeline.graph import Edge, Graph, Shortcut
    from thermocline.stages.contract import Stage

Turns: TypeAlias = "Generator[LayerIndex | None, None, StepResult]"


class WalkError(Exception):
    """A stage failed: its name, its input, and what it raised."""

    def __init__(self, stage: str, message: StageMessage, failure: Exception) -> None:
        super().__init__(stage)
        self.stage = stage
        self.message = message
        self.failure = failure


class Walk:
    """Runs chunks one at a time. Results equal the ring's to the bit."""

    def __init__(self, graph: Graph, *, overlap: bool = True) -> None:
        """overlap: False waits for each stage before the next begins, for comparison."""
        self._graph = graph
        self._overlap = overlap
        self._outgoing = {name: graph.outgoing(name) for name in graph.stages}

    def turns(self, chunk: Chunk, *, in_parts: bool = False) -> Turns:
        """Walk, and return the end. Blocks; raises WalkError from what a stage raised.

        A prompt's walk yields where its lane may be given to others: the layer that it is about to enter, or,
        in_parts, None before every other stage.
        """
        shortcut = self._graph.shortcut
        if shortcut is not None and not in_parts and shortcut.usable(chunk):
            return (yield from self._run_layers(chunk, shortcut))
        joins = {name: Join() for name in self._graph.joins}
        way = _Way(self._graph, self._outgoing, joins, overlap=self._overlap)
        return (yield from way.turns(chunk, in_parts=in_parts))

    def _run_layers(self, chunk: Chunk, shortcut: Shortcut) -> Turns:
        stages = self._graph.stages
        message = _finish("embed", stages["embed"], chunk)
        for layer in range(shortcut.num_layers):
            if chunk.is_prompt:
                yield LayerIndex(layer)
            message = _finish("layer", shortcut.stage, message)
        result = _finish("head", stages["head"], message)
        assert isinstance(result, StepResult)
        return result


@dataclass(slots=True)
class _Visit:
    """A stage at work on a message."""

    name: str
    message: StageMessage
    coroutine: Coroutine[Any, Any, StageMessage | None]
    waits_for: Future[Any] | None = None
    output: StageMessage | None = None

    def advance(self) -> None:
        """Run until the stage is done or waits for another lane. Raises WalkError."""
        try:
            waits_for = self.coroutine.send(None)
        except StopIteration as done:
            self.waits_for, self.output = None, done.value
            return
        except Exception as error:
            raise WalkError(self.name, self.message, error) from error
        if not isinstance(waits_for, Future):
            self.coroutine.close()
            raise WalkError(self.name, self.message, _waited())
        self.waits_for = waits_for


class _Way:
    """One chunk's way from the source to the results."""

    def __init__(
        self,
        graph: Graph,
        outgoing: Mapping[str, tuple[Edge, ...]],
        joins: Mapping[str, Join],
        *,
        overlap: bool,
    ) -> None:
        self._graph = graph
        self._outgoing = outgoing
        self._joins = joins
        self._overlap = overlap
        self._ready: deque[tuple[str, StageMessage]] = deque()
        self._waiting: list[_Visit] = []

    def turns(self, chunk: Chunk, *, in_parts: bool) -> Turns:
        self._ready.append((self._graph.source, chunk))
        try:
            while True:
                must_wait = not self._ready or (self._waiting and not self._overlap)
                if chunk.is_prompt and not must_wait:
                    layer = self._layer_ahead()
                    if in_parts or layer is not None:
                        yield layer
                visit = self._resume() if must_wait else self._start()
                if visit.waits_for is not None:
                    self._waiting.append(visit)
                elif visit.output is not None:
                    result = self._pass_on(visit.name, visit.output)
                    if result is not None:
                        return result
        finally:
            # What other lanes still do for this chunk must end before its arrays are let go.
            wait(visit.waits_for for visit in self._waiting if visit.waits_for is not None)
            for visit in self._waiting:
                visit.coroutine.close()
            for name, message in self._ready:
                self._graph.drop(name, message)

    def _layer_ahead(self) -> LayerIndex | None:
        """Return the layer that the next stage enters, None where it goes on in one."""
        name, message = self._ready[0]
        if name in self._graph.ordered and isinstance(message, Hidden):
            return message.layer
        return None

    def _start(self) -> _Visit:
        name, message = self._ready.popleft()
        visit = _Visit(name, message, self._graph.stages[name](message))
        visit.advance()
        return visit

    def _resume(self) -> _Visit:
        assert self._waiting, "the walk ended before the graph did"
        futures = {visit.waits_for for visit in self._waiting if visit.waits_for is not None}
        done, _ = wait(futures, return_when=FIRST_COMPLETED)
        visit = next(visit for visit in self._waiting if visit.waits_for in done)
        self._waiting.remove(visit)
        visit.advance()
        return visit

    def _pass_on(self, name: str, output: StageMessage) -> StepResult | None:
        for edge in self._outgoing[name]:
            if not edge.carries(output):
                continue
            if edge.target == RESULTS:
                assert isinstance(output, StepResult)
                return output
            join = self._joins.get(edge.target)
            if join is None:
                self._ready.append((edge.target, output))
                continue
            assert isinstance(output, LayerWork | PartialSum | LayerSum)
            self._ready.extend((edge.target, joined) for joined in join.add(output))
        return None


def _finish(name: str, stage: Stage[Any, Any], message: Any) -> Any:  # noqa: ANN401 - as the stage
    """Return the output of a stage, whose other lanes are waited for. Raises WalkError."""
    coroutine = stage(message)
    try:
        while isinstance(waits_for := coroutine.send(None), Future):
            wait((waits_for,))
    except StopIteration as done:
        return done.value
    except Exception as error:
        raise WalkError(name, message, error) from error
    coroutine.close()
    raise WalkError(name, message, _waited())


def _waited() -> RuntimeError:
    return RuntimeError("a stage waited for something else than a lane during a walk")
