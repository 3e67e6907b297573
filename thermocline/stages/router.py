"""Chooses each token's experts and groups tokens by tier and expert."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.experts.dispatch import dispatch
from thermocline.messages import LayerIndex, LayerWork
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from thermocline.experts.heat import ExpertHeat
    from thermocline.experts.placement import Placement
    from thermocline.experts.routing_log import RoutingLog
    from thermocline.kernels.lane import JobLane
    from thermocline.messages import Hidden
    from thermocline.models.contract import Model


class RouterStage:
    """Hidden inside a layer -> LayerWork."""

    def __init__(
        self,
        model: Model,
        placement: Placement,
        heat: ExpertHeat,
        routing_log: RoutingLog,
        lane: JobLane,
        remote_mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """remote_mask: bool [layers, experts], those that workers compute."""
        self._model = model
        self._heat = heat
        self._routing_log = routing_log
        self._lane = lane
        self._remote_mask = remote_mask
        num_layers = len(placement.hot)
        self._hot_masks = [placement.hot_mask(LayerIndex(n)) for n in range(num_layers)]

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
        remote_mask = None if self._remote_mask is None else self._remote_mask[layer]
        shares = dispatch(routing, self._hot_masks[layer], remote_mask)
        return LayerWork(chunk, layer, residual, x, routing, shares)
