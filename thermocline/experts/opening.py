"""Makes the hot tier's device with all that belongs to it: store, staging, promotion, compute.

Puts the first experts there. Knows no stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.experts.device_compute import DeviceExpertCompute
from thermocline.experts.simulated import CopyEngine, SimulatedDevice
from thermocline.experts.staging import StagingRing
from thermocline.experts.static_cache import StaticCache
from thermocline.experts.store import ExpertStore
from thermocline.experts.tiers import DeviceTiers, whatever_is_there
from thermocline.kernels.lane import LaneThread
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex
from thermocline.traces.lanes import Lane
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from thermocline.config import PlacementConfig
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.experts.placement import Placement
    from thermocline.kernels.contract import Kernels
    from thermocline.traces.recorder import Recorder

# Experts on their way for one layer of one chunk, as the planner counts them.
_STAGED_EXPERTS: Final = 16


@dataclass(frozen=True, slots=True)
class HotDevice:
    """A device and those who use it."""

    device: SimulatedDevice
    store: ExpertStore
    ring: StagingRing
    tiers: DeviceTiers
    compute: DeviceExpertCompute
    lanes: tuple[LaneThread, ...]


def open_simulated(
    config: PlacementConfig,
    catalog: ExpertCatalog,
    placement: Placement,
    fingerprint: str,
    kernels: Kernels,
    recorder: Recorder,
    owned: ExitStack,
) -> HotDevice:
    """Return a simulated device with the hot experts of `placement` on it; `owned` closes it.

    kernels: of one thread, the device's own. Raises ConfigError where a static placement does not fit.
    """
    copies = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
    lane = owned.enter_context(LaneThread(Lane.HOT, recorder))
    engine = CopyEngine(copies, config.simulated_copy_bytes_per_s, recorder)
    device = SimulatedDevice(catalog, config.simulated_memory_bytes, kernels, lane, engine)
    sizes = [catalog.expert_bytes(LayerIndex(n)) for n in range(catalog.num_layers)]
    capacity = config.simulated_memory_bytes
    if config.expert_budget_bytes is not None:
        capacity = min(capacity, config.expert_budget_bytes)
    wanted = sum(len(hot) * nbytes for hot, nbytes in zip(placement.hot, sizes, strict=True))
    if config.expert_cache == "static" and wanted > capacity:
        raise ConfigError(
            f"the hot experts have {format_bytes(wanted)}, and the simulated device has "
            f"{format_bytes(capacity)}: choose a smaller --hot-fraction"
        )
    store = ExpertStore(sizes, catalog.num_experts, device, StaticCache(sizes), capacity, recorder)
    store.install(_by_rank(placement))
    ring = StagingRing(device, _STAGED_EXPERTS, store.give_up)
    last_layer = max((n for n, nbytes in enumerate(sizes) if nbytes), default=0)
    tiers = DeviceTiers(store, whatever_is_there, LayerIndex(last_layer))
    compute = DeviceExpertCompute(fingerprint, store, device, ring)
    return HotDevice(device, store, ring, tiers, compute, (copies, lane))


def _by_rank(placement: Placement) -> Iterator[ExpertKey]:
    """Yield a placement's experts, first the first of every layer."""
    for rank in range(placement.num_experts):
        for layer, hot in enumerate(placement.hot):
            if rank < len(hot):
                yield ExpertKey(LayerIndex(layer), ExpertIndex(hot[rank]))
