"""A whole layer as one job, where nothing but a hint to prefetch has to happen between its parts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.messages import Hidden, LayerIndex
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.experts.dispatch.dispatcher import ExpertDispatcher
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import FloatArray
    from thermocline.models.contract import Model
    from thermocline.stages.prefetch import PrefetchStage
    from thermocline.workers.lane import JobLane


class FusedLayerStage:
    """Hidden before a layer -> Hidden before the next."""

    def __init__(
        self,
        model: Model,
        cache: SequenceCache,
        dispatcher: ExpertDispatcher,
        observer: RoutingObserver,
        lane: JobLane,
        prefetch: PrefetchStage | None = None,
    ) -> None:
        """prefetch: is told each layer's choice before its experts are computed."""
        self._model = model
        self._cache = cache
        self._dispatcher = dispatcher
        self._observer = observer
        self._lane = lane
        self._prefetch = prefetch

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Attend, route and compute the chosen experts."""
        chunk, layer = hidden.chunk, hidden.layer
        x = await self._lane.run(Name.LAYER, partial(self._run, hidden), chunk, layer)
        return Hidden(chunk, LayerIndex(layer + 1), x)

    def _run(self, hidden: Hidden) -> FloatArray:
        chunk, layer = hidden.chunk, hidden.layer
        on_routed = None if self._prefetch is None else self._prefetch.on_routed(chunk, layer)
        x, routing = self._model.layer(layer, chunk, hidden.x, self._cache, on_routed)
        self._observer.observe(chunk, layer, routing)
        self._observer.assigned(chunk, routing, is_hot=False)
        self._dispatcher.computed_here(chunk, layer)
        return x
