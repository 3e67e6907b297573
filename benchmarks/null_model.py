"""A model without arithmetic: real stages over it cost what the pipeline itself costs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.experts.dispatch.dispatcher import StaticDispatcher
from thermocline.experts.heat import ExpertHeat
from thermocline.experts.layer_hits import LayerHits
from thermocline.experts.placement.placement import uniform_placement
from thermocline.experts.routing_log import RoutingLog
from thermocline.experts.routing_observer import RoutingObserver
from thermocline.messages import BackendRole, LayerIndex, LayerSum, PartialSum, Routing
from thermocline.models.routing import Routed
from thermocline.pipeline.execution.graph import moe_graph
from thermocline.pipeline.execution.runner import FusedStages
from thermocline.stages.attend import AttendStage
from thermocline.stages.combine import CombineStage
from thermocline.stages.embed import EmbedStage
from thermocline.stages.experts import ExpertStage
from thermocline.stages.fused_layer import FusedLayerStage
from thermocline.stages.head import HeadStage
from thermocline.stages.router import RouterStage, routing_of
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.kernels.whole_layer import OnRouted
    from thermocline.messages import Chunk, ExpertDispatch, ExpertResult, LayerWork
    from thermocline.pipeline.execution.graph import Graph
    from thermocline.workers.lane import JobLane

HIDDEN, VOCAB = 4, 16


@dataclass(frozen=True, slots=True)
class _NullSpec:
    num_layers: int
    vocab_size: int = VOCAB


@dataclass
class NullModel:
    """Tokens go to experts by their row; numbers are all zero."""

    num_layers: int
    num_experts: int = 8
    used: int = 2
    spec: _NullSpec = field(init=False)
    _routings: dict[tuple[int, int], Routing] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Make the dimensions that stages ask for."""
        self.spec = _NullSpec(self.num_layers)

    def embed(self, token_ids: Any, *, may_be_missing: bool) -> Any:  # noqa: ANN401 - stands in for a Model, array by array
        """Return zeros [T, D]."""
        return np.zeros((len(token_ids), HIDDEN), np.float32)

    def embed_layers(self, token_ids: Any, x: Any, *, prompt: bool, may_be_missing: bool) -> None:  # noqa: ANN401
        """Return None: no layer has embeddings of its own."""

    def attend(self, layer: LayerIndex, chunk: Chunk, x: Any, pool: Any) -> Any:  # noqa: ANN401
        """Return x."""
        return x

    def begin_attend(self, layer: LayerIndex, chunk: Chunk, x: Any, pool: Any) -> Any:  # noqa: ANN401
        """Return what returns x."""
        return lambda: x

    def route(self, layer: LayerIndex, chunk: Chunk, x: Any) -> Any:  # noqa: ANN401
        """Return x twice, and a routing that differs by row and layer; made once, since it is no overhead's part."""
        key = (len(x), layer % self.num_experts)
        if key not in self._routings:
            first = (np.arange(len(x)) + layer)[:, None] * self.used
            ids = (first + np.arange(self.used)) % self.num_experts
            weights = np.full(ids.shape, 1 / self.used, np.float32)
            self._routings[key] = Routing(ids.astype(np.int32), weights)
        return Routed(x, x, self._routings[key])

    def layer(
        self,
        layer: LayerIndex,
        chunk: Chunk,
        x: Any,  # noqa: ANN401
        pool: Any,  # noqa: ANN401
        on_routed: OnRouted | None = None,
    ) -> Any:  # noqa: ANN401
        """Return x and a routing, as one job."""
        routing = self.route(layer, chunk, x).routing
        if on_routed is not None:
            on_routed(routing.expert_ids, x)
        return x, routing

    def final_norm(self, x: Any) -> Any:  # noqa: ANN401
        """Return x."""
        return x

    def head(self, x: Any, *, prompt: bool) -> Any:  # noqa: ANN401
        """Return zeros [rows, V]."""
        return np.zeros((len(x), VOCAB), np.float32)


class NullCompute:
    """A tier's experts on a lane, without arithmetic."""

    def __init__(self, role: BackendRole, lane: JobLane) -> None:
        self.role = role
        self._lane = lane

    async def compute(self, work: LayerWork, dispatch: ExpertDispatch) -> ExpertResult:
        """Return zeros, or the residual where the share is the whole layer."""
        name = Name.HOT if self.role is BackendRole.HOT else Name.COLD

        def job() -> ExpertResult:
            if len(dispatch.rows) == work.routing.expert_ids.size:
                return LayerSum(work.chunk, work.layer, self.role, work.residual)
            values = np.zeros((len(dispatch.rows), HIDDEN), np.float32)
            return PartialSum(
                work.chunk, work.layer, self.role, dispatch.rows, dispatch.slots, values
            )

        return await self._lane.run(
            name,
            job,
            work.chunk,
            work.layer,
            experts=len(dispatch.experts),
            pairs=len(dispatch.rows),
        )


class _NullDense:
    def combine(self, residual: Any, parts: Any, num_slots: int) -> Any:  # noqa: ANN401
        return residual


def null_graph(
    model: NullModel,
    cpu: JobLane,
    hot: JobLane | None = None,
    *,
    credits: int = 1,
) -> tuple[Graph, FusedStages]:
    """Return the real ring of real stages, and the stage of a whole layer; with a `hot` lane half of the experts are hot."""
    placement = uniform_placement(model.num_layers, model.num_experts, 0.5 if hot else 0.0)
    dispatcher = StaticDispatcher(placement)
    heat = ExpertHeat(model.num_layers, model.num_experts)
    last_layer = LayerIndex(model.num_layers - 1)
    observer = RoutingObserver(heat, RoutingLog(), None, last_layer, LayerHits())
    null: Any = model  # stands in for a Model; there is no cache
    no_pool: Any = None
    stages: dict[str, Any] = {
        "embed": EmbedStage(null, cpu),
        "attend": AttendStage(null, no_pool, cpu),
        "router": RouterStage(routing_of(null), dispatcher, observer, cpu),
        "cold": ExpertStage(BackendRole.COLD, NullCompute(BackendRole.COLD, cpu)),
        "combine": CombineStage(_NullDense(), cpu),  # type: ignore[arg-type]
        "head": HeadStage(null, cpu, null.final_norm),
    }
    if hot is not None:
        stages["hot"] = ExpertStage(BackendRole.HOT, NullCompute(BackendRole.HOT, hot))
    layer = FusedLayerStage(null, no_pool, dispatcher, observer, cpu)
    return moe_graph(stages, model.num_layers, credits), FusedStages(model.num_layers, layer)
