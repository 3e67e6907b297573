"""Chooses each token's experts and groups tokens by tier and expert."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.messages import LayerWork
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.experts.heat import ExpertHeat
    from thermocline.experts.routing_log import RoutingLog
    from thermocline.experts.tiers import Tiers
    from thermocline.kernels.lane import JobLane
    from thermocline.messages import Hidden
    from thermocline.models.contract import Model


class RouterStage:
    """Hidden inside a layer -> LayerWork."""

    def __init__(
        self,
        model: Model,
        tiers: Tiers,
        heat: ExpertHeat,
        routing_log: RoutingLog,
        lane: JobLane,
    ) -> None:
        self._model = model
        self._tiers = tiers
        self._heat = heat
        self._routing_log = routing_log
        self._lane = lane

    async def __call__(self, hidden: Hidden) -> LayerWork:
        """Route one chunk's tokens."""
        job = partial(self._route, hidden)
        return await self._lane.run(Name.ROUTER, job, hidden.chunk, hidden.layer)

    def _route(self, hidden: Hidden) -> LayerWork:
        chunk, layer = hidden.chunk, hidden.layer
        residual, x, routing = self._model.route(layer, hidden.x, prompt=chunk.is_prompt)
        self._heat.record(layer, routing)
        if chunk.wants_routing:
            self._routing_log.record(chunk, layer, routing)
        shares, lease = self._tiers.dispatch(layer, routing)
        return LayerWork(chunk, layer, residual, x, routing, shares, lease)
