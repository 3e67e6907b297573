"""A whole layer as one job, where nothing but a hint to prefetch has to happen between its parts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.messages import Hidden, LayerIndex
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable

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
        give_back: Callable[[], None] | None = None,
    ) -> None:
        """prefetch: is told each layer's choice before its experts are computed, and of a prompt before its first layer.
        give_back: called behind a prompt's last layer where prefetch waits for hints. What jobs keep is memory that files lack.
        """
        self._model = model
        self._cache = cache
        self._dispatcher = dispatcher
        self._observer = observer
        self._lane = lane
        self._prefetch = prefetch
        self._give_back = give_back

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Attend, route and compute the chosen experts."""
        chunk, layer = hidden.chunk, hidden.layer
        if self._prefetch is not None and layer == 0 and chunk.is_prompt:
            await self._prefetch(hidden)
        x = await self._lane.run(Name.LAYER, partial(self._run, hidden), chunk, layer)
        return Hidden(chunk, LayerIndex(layer + 1), x)

    def _run(self, hidden: Hidden) -> FloatArray:
        chunk, layer = hidden.chunk, hidden.layer
        on_routed = None if self._prefetch is None else self._prefetch.on_routed(chunk, layer)
        x, routing = self._model.layer(layer, chunk, hidden.x, self._cache, on_routed)
        self._observer.observe(chunk, layer, routing)
        self._observer.assigned(chunk, routing, is_hot=False)
        self._dispatcher.computed_here(chunk, layer)
        is_last = (
            chunk.is_prompt and len(chunk.logits_rows) and layer == self._model.spec.num_layers - 1
        )
        if on_routed is not None and self._give_back is not None and is_last:
            self._give_back()
        return x
