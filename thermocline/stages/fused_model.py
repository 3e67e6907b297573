"""All layers as one job, where a device has every weight, and has or gets every expert: nothing goes to the host in between."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from thermocline.messages import Hidden, LayerIndex
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.kernels.gpu.resident import LayerExperts
    from thermocline.messages import FloatArray, Routing
    from thermocline.models.device.non_expert import DeviceNonExpert
    from thermocline.workers.lane import JobLane


class WholeExperts(Protocol):
    """The experts of such jobs."""

    def held(self) -> AbstractContextManager[LayerExperts]:
        """Hold what is there in place, and give what computes layers. Raises DeviceMemoryError."""
        ...

    def count(self, layer: LayerIndex, routing: Routing) -> None:
        """Count what a layer of the last job chose."""
        ...


class FusedModelStage:
    """Hidden before the first layer -> Hidden behind the last one."""

    def __init__(
        self,
        non_expert: DeviceNonExpert,
        experts: WholeExperts,
        observer: RoutingObserver,
        lane: JobLane,
        on_done: Callable[[int, float], None] | None = None,
    ) -> None:
        """on_done: told how many tokens a chunk had, and how many seconds it took."""
        self._non_expert = non_expert
        self._experts = experts
        self._observer = observer
        self._lane = lane
        self._on_done = on_done

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Compute every layer. Raises DeviceMemoryError."""
        spec = self._non_expert.spec
        num_hot = spec.num_layers - len(spec.dense_layers)
        job = partial(self._run, hidden)
        x = await self._lane.run(Name.LAYER, job, hidden.chunk, hot_layers=num_hot)
        return Hidden(hidden.chunk, LayerIndex(spec.num_layers), x)

    def _run(self, hidden: Hidden) -> FloatArray:
        start_s = time.perf_counter()
        with self._experts.held() as experts:
            x, routings = self._non_expert.all_layers(hidden.chunk, hidden.x, experts)
        for layer, routing in routings.items():
            self._observer.observe(hidden.chunk, layer, routing)
            self._observer.assigned(hidden.chunk, routing, is_hot=True)
            self._experts.count(layer, routing)
        if self._on_done is not None:
            self._on_done(hidden.chunk.num_tokens, time.perf_counter() - start_s)
        return x
