"""All layers as one job, where a device has every weight and every expert: nothing goes to the host in between."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.messages import Hidden, LayerIndex
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.experts.backends.full_device import FullDevice, NoExperts
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.messages import FloatArray
    from thermocline.models.device_non_expert import DeviceNonExpert
    from thermocline.workers.lane import JobLane


class FusedModelStage:
    """Hidden before the first layer -> Hidden behind the last one."""

    def __init__(
        self,
        non_expert: DeviceNonExpert,
        experts: FullDevice | NoExperts,
        observer: RoutingObserver,
        lane: JobLane,
    ) -> None:
        self._non_expert = non_expert
        self._experts = experts
        self._observer = observer
        self._lane = lane

    @property
    def is_ready(self) -> bool:
        """Whether all experts are on the device now."""
        return self._experts.is_full

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Compute every layer. Raises DeviceMemoryError."""
        spec = self._non_expert.spec
        num_hot = spec.num_layers - len(spec.dense_layers)
        job = partial(self._run, hidden)
        x = await self._lane.run(Name.LAYER, job, hidden.chunk, hot_layers=num_hot)
        return Hidden(hidden.chunk, LayerIndex(spec.num_layers), x)

    def _run(self, hidden: Hidden) -> FloatArray:
        with self._experts.held() as experts:
            x, routings = self._non_expert.all_layers(hidden.chunk, hidden.x, experts)
        for layer, routing in routings.items():
            self._observer.observe(hidden.chunk, layer, routing)
            self._observer.assigned(hidden.chunk, routing, is_hot=True)
            self._experts.count_hits(routing)
        return x
