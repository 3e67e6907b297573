"""Chooses each token's experts and groups tokens by tier and expert.

Who routes is given: a model from what attention left, or a device's trunk, which attends in the same job.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.experts.layer_hits import is_all_hot
from thermocline.messages import LayerWork
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.experts.dispatch.dispatcher import ExpertDispatcher
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.messages import Hidden
    from thermocline.models.contract import Model
    from thermocline.models.routing import Routed
    from thermocline.workers.lane import JobLane


def routing_of(model: Model) -> Callable[[Hidden], Routed]:
    """Return how a model routes what its attention left."""
    return lambda hidden: model.route(hidden.layer, hidden.chunk, hidden.x)


class RouterStage:
    """Hidden inside a layer, or before it where `route` attends -> LayerWork."""

    def __init__(
        self,
        route: Callable[[Hidden], Routed],
        dispatcher: ExpertDispatcher,
        observer: RoutingObserver,
        lane: JobLane,
        name: Name = Name.ROUTER,
    ) -> None:
        """name: what the trace calls the job."""
        self._route_tokens = route
        self._dispatcher = dispatcher
        self._observer = observer
        self._name = name
        self._lane = lane

    async def __call__(self, hidden: Hidden) -> LayerWork:
        """Route one chunk's tokens."""
        job = partial(self._route, hidden)
        return await self._lane.run(self._name, job, hidden.chunk, hidden.layer)

    def _route(self, hidden: Hidden) -> LayerWork:
        chunk, layer = hidden.chunk, hidden.layer
        routed = self._route_tokens(hidden)
        routing = routed.routing
        self._observer.observe(chunk, layer, routing)
        shares, lease = self._dispatcher.dispatch(chunk, layer, routing)
        self._observer.assigned(chunk, routing, is_hot=is_all_hot(shares, lease))
        return LayerWork(
            chunk, layer, routed.residual, routed.x, routing, shares, lease, routed.ending
        )
