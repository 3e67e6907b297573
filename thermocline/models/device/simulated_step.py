"""The device's side of a shared decode step where this process plays the device: one thread, and a link with a speed.

The step is recorded once, as a list of nodes that the core runs without Python. Non-expert weights and the KV cache are
the CPU's; experts are those in the device's slots. Knows no store and no policy.
"""

from __future__ import annotations

import time
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.handoff import PATIENCE_NS, HandoffEnd
from thermocline.kernels.whole_step import step_places, step_ropes
from thermocline.models.layers import RotaryTable
from thermocline.models.placed_layers import PlacedLayers
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from thermocline.kernels._native import HandoffPage, StepGraph
    from thermocline.kernels.cpu import NativeKernels
    from thermocline.kernels.handoff import Handoff
    from thermocline.kernels.weight import ExpertStack
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import Chunk, FloatArray
    from thermocline.models.contract import NonExpertParts, SharedStep
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import LaneThread


class StepNode(IntEnum):
    """What a node of the graph does; the numbers are the core's."""

    ATTEND = 0
    ROUTE = 1
    PUBLISH = 2
    HOT = 3
    WAIT = 4
    COMBINE = 5


_SHOWN: Final[Mapping[int, Name]] = {
    StepNode.ATTEND: Name.ATTEND,
    StepNode.ROUTE: Name.ROUTER,
    StepNode.HOT: Name.HOT,
    StepNode.COMBINE: Name.COMBINE,
}


class SimulatedStep:
    """Computes decode steps on `lane` with `kernels`, as a device would. See `StepDevice`."""

    takes_branches = False  # its list of nodes copies nothing in the cache

    def __init__(
        self,
        parts: NonExpertParts,
        slots: Sequence[ExpertStack | None],
        cache: SequenceCache,
        kernels: NativeKernels,
        lane: LaneThread,
        bytes_per_s: float,
        recorder: Recorder,
    ) -> None:
        """slots: by layer, the device's; None without routed experts. bytes_per_s: of the link."""
        self._num_layers, self._hidden = len(parts.layers), len(parts.output_norm)
        tables = {rule: RotaryTable(kernels.dense, rule) for rule in parts.ropes if rule}
        self._placed = PlacedLayers(parts, cache, tables, slots)
        self._kernels = kernels
        self._lane = lane
        self._bytes_per_s = bytes_per_s
        self._recorder = recorder
        self._page: HandoffPage | None = None
        self._graph: StepGraph | None = None
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        nodes = 0 if self._graph is None else self._graph.num_nodes
        return f"SimulatedStep({self._num_layers} layers, {nodes} nodes)"

    def launch(self, handoff: Handoff, step: SharedStep) -> None:
        """See `StepDevice.launch`."""
        chunk, page = step.chunk, handoff.page
        graph = self._recorded(page)
        given = self._placed.given(chunk, step.x)
        compute = partial(
            graph.run,
            step.epoch,
            PATIENCE_NS,
            given.x,
            given.positions,
            step_ropes(given.ropes),
            step_places(self._kernels.dense, given.places),
            given.runs,
            step.residency,
        )
        self._failure = None
        self._lane.start(partial(self._run, compute, page, graph, step), chunk)

    def finish(self, num_rows: int, *, lost: bool = False) -> FloatArray:
        """See `StepDevice.finish`."""
        assert self._graph is not None, "no step was recorded"
        if lost:
            self._lane.submit_background(_nothing()).result()  # behind the step
            if self._failure is not None:
                raise self._failure
        out = np.empty((num_rows, self._hidden), np.float32)
        self._graph.output(out)
        return out

    def _run(
        self, compute: Callable[[], int], page: HandoffPage, graph: StepGraph, step: SharedStep
    ) -> None:
        start_ns, worked_ns = time.perf_counter_ns(), 0
        try:
            end = HandoffEnd(compute())
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            self._failure = error
            page.abort(step.epoch)
            return
        if end is HandoffEnd.DONE:
            step.on_done()
            spans = _spans(graph)
            nodes = spans[(spans[:, 2] != StepNode.WAIT) & (spans[:, 2] != StepNode.PUBLISH)]
            worked_ns = int((nodes[:, 1] - nodes[:, 0]).sum())
            if self._recorder.enabled:
                self._show(spans, step.chunk)
        self._lane.leave_out(time.perf_counter_ns() - start_ns - worked_ns)

    def _show(self, spans: NDArray[np.int64], chunk: Chunk) -> None:
        """Record when the device's nodes ran; it waits in between. What nobody had to wait for belongs to the hot experts."""
        record, lane = self._recorder, self._lane.lane
        record.flow(chunk.id, lane, int(spans[0, 0]), "step")
        num_cold = num_hot = 0
        for begin_ns, end_ns, node, layer, num_pairs in spans.tolist():
            name = _SHOWN.get(node)
            if node == StepNode.HOT:
                num_hot = num_pairs
            elif node == StepNode.WAIT:
                num_cold = num_pairs
            is_part = name is Name.COMBINE and not num_cold
            if name is None or (name is Name.HOT and not num_hot):
                continue
            args = {"chunk": chunk.id, "tokens": chunk.num_tokens, "layer": layer}
            record.span(lane, Name.HOT if is_part else name, begin_ns, end_ns, args)

    def node_spans(self) -> NDArray[np.int64]:
        """Return the last step's nodes, [nodes, 5]: begin and end in monotonic ns, kind, layer, and pairs."""
        assert self._graph is not None, "no step was recorded"
        return _spans(self._graph)

    def _recorded(self, page: HandoffPage) -> StepGraph:
        if self._graph is None or self._page is not page:
            layers = [self._kernels.placed_layer(each) for each in self._placed.layers()]
            self._page = page
            self._graph = self._kernels.step_graph(page, layers, self._bytes_per_s)
        return self._graph


def _nothing() -> Generator[None, None, None]:
    yield from ()


def _spans(graph: StepGraph) -> NDArray[np.int64]:
    spans = np.empty((graph.num_nodes, 5), np.int64)
    graph.spans(spans)
    return spans
