"""All layers of a decode step as one job of a device, whose missing experts the CPU computes.

Where each expert is stays fixed for the length of a step. What is evicted meanwhile gives up its slot afterwards.
"""

from __future__ import annotations

import logging
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import StepLostError
from thermocline.experts.cache.residency import StackedResidency
from thermocline.messages import Hidden, LayerIndex
from thermocline.models.contract import SharedStep
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.experts.cache.empty_store import StepStore
    from thermocline.experts.dispatch.dispatcher import CacheDispatcher
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.kernels.handoff import Handoff
    from thermocline.messages import Chunk, FloatArray, IntArray
    from thermocline.models.contract import StepDevice
    from thermocline.workers.lane import LaneThread

_LOG: Final = logging.getLogger("thermocline.devices")
# So many steps may be lost before the device's steps are given up for good.
_MAX_LOST: Final = 1
_NS: Final = 1e-9


class SharedModelStage:
    """Hidden before the first layer -> Hidden behind the last one, of decode steps."""

    def __init__(
        self,
        device: StepDevice,
        handoff: Handoff,
        store: StepStore,
        dispatcher: CacheDispatcher | None,
        observer: RoutingObserver,
        lane: LaneThread,
    ) -> None:
        """dispatcher: told how long steps take, if there is one. lane: the CPU's."""
        self.device = device
        self.handoff = handoff
        self._store = store
        self._dispatcher = dispatcher
        self._observer = observer
        self._lane = lane
        self._routed = np.array(handoff.routed, np.int32)
        self._edges = [handoff.routed[0], handoff.routed[-1]]
        self._residency = StackedResidency()
        self._num_lost = 0

    def takes(self, chunk: Chunk) -> bool:
        """Whether a chunk is such a step, small enough, and the device computes its branches."""
        is_step = not chunk.is_prompt and chunk.num_tokens <= self.handoff.max_rows
        is_step &= self.device.takes_branches or not chunk.has_branches
        return is_step and self._num_lost <= _MAX_LOST

    @property
    def has_experts(self) -> bool:
        """Whether the device has any experts now."""
        return not self._store.is_empty

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Compute every layer. Raises StepLostError, and what the device raises."""
        job = partial(self.run, hidden)
        spans = attrgetter("spans")
        x = await self._lane.run_layers(Name.COLD, job, hidden.chunk, partial(spans, self.handoff))
        return Hidden(hidden.chunk, LayerIndex(self.handoff.num_layers), x)

    def run(self, hidden: Hidden) -> FloatArray:
        """Return x [T, D] behind the last layer; on the CPU's lane."""
        chunk, handoff = hidden.chunk, self.handoff
        rows = self._store.hold()
        try:
            residency = self._residency.of(rows)
            observe = partial(self._observe, chunk, residency)
            # Requests that want to know their experts read them as soon as the step has ended.
            waits = chunk.wants_routing
            on_done = _nothing if waits else observe
            step = SharedStep(handoff.begin(), chunk, hidden.x, residency, on_done)
            x = self._compute(step)
            if waits:
                observe()
        finally:
            self._store.let_go()
        first, last = (float(handoff.spans[layer, 0]) * _NS for layer in self._edges)
        if self._dispatcher is not None:
            self._dispatcher.computed_step(chunk, first, last)
        return x

    def _observe(self, chunk: Chunk, residency: IntArray) -> None:
        routing = self.handoff.routing(chunk.num_tokens)
        self._observer.observe_step(chunk, self._routed, routing, residency)

    def _compute(self, step: SharedStep) -> FloatArray:
        num_rows, lost = step.chunk.num_tokens, None
        self.device.launch(self.handoff, step)
        try:
            self.handoff.serve(num_rows, step.epoch)
        except StepLostError as error:
            lost = error
        # What went wrong on the device comes first.
        out = self.device.finish(num_rows, lost=lost is not None)
        if lost is not None:
            self._num_lost += 1
            if self._num_lost > _MAX_LOST:
                _LOG.error("decode steps are computed stage by stage from now on: %s", lost)
            raise lost
        return out


def _nothing() -> None:
    """Do nothing."""
