"""Walks one chunk through the graph on the calling thread: stage after stage, without a queue.

The same graph and the same stage objects as in the runner's ring, for a chunk that has the machine to
itself: a hop between tasks costs more than some stages of a single token. Knows no event loop; a lane
that is asked to run a job outside of one runs it at once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from thermocline.messages import Hidden, LayerSum, LayerWork, PartialSum, StepResult
from thermocline.pipeline.graph import RESULTS
from thermocline.pipeline.join import Join

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from thermocline.messages import Chunk, StageMessage
    from thermocline.pipeline.graph import Edge, Graph, Shortcut
    from thermocline.stages.contract import Stage


class WalkError(Exception):
    """A stage failed: its name, its input, and what it raised."""

    def __init__(self, stage: str, message: StageMessage, failure: Exception) -> None:
        super().__init__(stage)
        self.stage = stage
        self.message = message
        self.failure = failure


class Walk:
    """Runs chunks one at a time. Results equal the ring's to the bit."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._outgoing: dict[str, tuple[Edge, ...]] = {
            name: tuple(edge for edge in graph.edges if edge.source == name)
            for name in graph.stages
        }

    def run(self, chunk: Chunk) -> StepResult:
        """Return the end of the chunk's walk. Blocks; raises WalkError from what a stage raised."""
        shortcut = self._graph.shortcut
        if shortcut is not None and shortcut.usable():
            return self._run_layers(chunk, shortcut)
        joins = {name: Join() for name in self._graph.joins}
        pending: deque[tuple[str, StageMessage]] = deque([(self._graph.source, chunk)])
        while pending:
            name, message = pending.popleft()
            join = joins.get(name)
            if join is not None:
                assert isinstance(message, LayerWork | PartialSum | LayerSum)
                joined = join.add(message)
                if joined is None:
                    continue
                message = joined
            output = self._step(name, self._graph.stages[name], message)
            if output is None:
                continue
            for edge in self._outgoing[name]:
                if not edge.carries(output):
                    continue
                if edge.target == RESULTS:
                    assert isinstance(output, StepResult)
                    return output
                pending.append((edge.target, output))
        raise AssertionError("the walk ended before the graph did")

    def _run_layers(self, chunk: Chunk, shortcut: Shortcut) -> StepResult:
        stages = self._graph.stages
        message = self._step("embed", stages["embed"], chunk)
        for _ in range(shortcut.num_layers):
            assert isinstance(message, Hidden)
            message = self._step("layer", shortcut.stage, message)
        assert isinstance(message, Hidden)
        result = self._step("head", stages["head"], message)
        assert isinstance(result, StepResult)
        return result

    def _step(
        self, name: str, stage: Stage[Any, Any], message: StageMessage
    ) -> StageMessage | None:
        try:
            return _finish(stage(message))
        except Exception as error:
            raise WalkError(name, message, error) from error


def _finish(coroutine: Coroutine[Any, Any, StageMessage | None]) -> StageMessage | None:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: StageMessage | None = done.value
        return result
    coroutine.close()
    raise RuntimeError("a stage waited for something during a walk")
