"""All layers of a decode step as one job of the CPU, where nothing has to happen between them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import Hidden, LayerIndex, Routing
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.experts.dispatch.dispatcher import ExpertDispatcher
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import FloatArray
    from thermocline.models.contract import Model
    from thermocline.workers.lane import LaneThread


class FusedStepStage:
    """Hidden before the first layer -> Hidden behind the last one, of decode steps without branches."""

    def __init__(
        self,
        model: Model,
        cache: SequenceCache,
        dispatcher: ExpertDispatcher,
        observer: RoutingObserver,
        lane: LaneThread,
    ) -> None:
        self._model = model
        self._cache = cache
        self._dispatcher = dispatcher
        self._observer = observer
        self._lane = lane
        self._num_layers = model.spec.num_layers
        routed = [n for n, layer in enumerate(model.expert_layers) if layer is not None]
        self._routed = np.array(routed, np.int32)
        num_experts = max(model.spec.router.num_experts, 1)
        self._nothing_hot = np.full((self._num_layers, num_experts), -1, np.int32)
        self._spans: NDArray[np.int64] = np.zeros((self._num_layers, 2), np.int64)

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Compute every layer."""
        job = partial(self._run, hidden)
        x = await self._lane.run_layers(Name.LAYER, job, hidden.chunk, lambda: self._spans)
        return Hidden(hidden.chunk, LayerIndex(self._num_layers), x)

    def _run(self, hidden: Hidden) -> FloatArray:
        chunk = hidden.chunk
        step = self._model.step(chunk, hidden.x, self._cache)
        self._spans = step.spans
        if len(self._routed):
            routing = Routing(step.expert_ids, step.weights)
            self._observer.observe_step(chunk, self._routed, routing, self._nothing_hot)
            self._dispatcher.step_computed_here(chunk, step.spans[:, 1])
        return step.x
