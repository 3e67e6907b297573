"""Makes the hot tier's device with all that belongs to it: store, staging, promotion, compute.

Puts the first experts there. Knows no stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final

from thermocline.experts.cache_policy import SegmentedLruPolicy
from thermocline.experts.device_compute import DeviceExpertCompute
from thermocline.experts.promotion import PromotionThread
from thermocline.experts.simulated import CopyEngine, SimulatedDevice
from thermocline.experts.staging import StagingRing
from thermocline.experts.static_cache import StaticCache
from thermocline.experts.store import ExpertStore
from thermocline.experts.tiers import DeviceTiers, FastestSplit, whatever_is_there
from thermocline.experts.trial import TrialDevice, measure_costs
from thermocline.kernels.lane import LaneThread
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex
from thermocline.traces.lanes import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.config import PlacementConfig
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.experts.expert_costs import ExpertCosts
    from thermocline.experts.placement import Placement
    from thermocline.experts.tiers import Chooser
    from thermocline.kernels.contract import Kernels
    from thermocline.traces.recorder import Recorder

# Experts on their way for single layers of single chunks, as the planner counts them.
_STAGED_EXPERTS: Final = 16


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts to place: where they are, which are hot at first, how many a token uses.

    kernels: what computes them on the CPU. fingerprint: see `ExpertCompute`. remote_mask: bool [layers, experts],
    what workers compute; None without any.
    """

    catalog: ExpertCatalog
    placement: Placement
    num_used: int
    kernels: Kernels
    fingerprint: str
    remote_mask: NDArray[np.bool_] | None = None
    kept_away: NDArray[np.bool_] | None = None
    """bool [layers, experts], what the user keeps on the CPU."""


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
    experts: RoutedExperts,
    kernels: Kernels,
    recorder: Recorder,
    owned: ExitStack,
) -> HotDevice:
    """Return a simulated device that computes with `kernels`; `owned` closes it."""
    catalog = experts.catalog
    sizes = [catalog.expert_bytes(LayerIndex(n)) for n in range(catalog.num_layers)]
    copies = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
    lane = owned.enter_context(LaneThread(Lane.HOT, recorder))
    engine = CopyEngine(copies, config.simulated_copy_bytes_per_s, recorder)
    device = SimulatedDevice(catalog, config.simulated_memory_bytes, kernels, lane, engine)
    is_static = config.expert_cache == "static"
    capacity = _capacity(config, 0 if is_static else _STAGED_EXPERTS * max(sizes))
    costs: tuple[ExpertCosts | None, ...] = ()
    if not is_static:
        trial = TrialDevice(kernels, lane, config.simulated_copy_bytes_per_s)
        costs = measure_costs(catalog, experts.kernels, trial)
    policy = (
        StaticCache(sizes)
        if is_static
        else SegmentedLruPolicy(
            _with_visits(costs, experts.num_used), catalog.num_experts, capacity
        )
    )
    store = ExpertStore(sizes, catalog.num_experts, device, policy, capacity, recorder)
    ring = StagingRing(device, _STAGED_EXPERTS, store.give_up)
    choose: Chooser = whatever_is_there
    min_upload_tokens = inf
    first = tuple(_by_rank(experts.placement))
    if experts.kept_away is not None:
        store.bind(first, experts.kept_away)
    store.install(first)
    if not is_static:
        choose = split = FastestSplit(costs, lambda: ring.num_taken)
        min_upload_tokens = split.min_upload_tokens(catalog.num_experts, experts.num_used)
        owned.enter_context(PromotionThread(store))
    last_layer = max((n for n, nbytes in enumerate(sizes) if nbytes), default=0)
    tiers = DeviceTiers(
        store, choose, LayerIndex(last_layer), min_upload_tokens, experts.remote_mask
    )
    compute = DeviceExpertCompute(experts.fingerprint, store, device, ring)
    return HotDevice(device, store, ring, tiers, compute, (copies, lane))


def _capacity(config: PlacementConfig, staging_bytes: int) -> int:
    """What was asked for, or what staging leaves, at least half."""
    memory = config.simulated_memory_bytes
    if config.expert_budget_bytes is not None:
        return min(memory, config.expert_budget_bytes)
    return memory - min(staging_bytes, memory // 2)


def _with_visits(costs: Sequence[ExpertCosts | None], num_used: int) -> list[ExpertCosts | None]:
    """Return costs with each expert's share of what a layer costs however few experts the device computes.

    A promotion is judged by itself, and must not pay only if others are there too.
    """
    return [
        None
        if one is None
        else replace(one, device=tuple(seconds + one.visit / num_used for seconds in one.device))
        for one in costs
    ]


def _by_rank(placement: Placement) -> Iterator[ExpertKey]:
    """Yield a placement's experts, first the first of every layer."""
    for rank in range(placement.num_experts):
        for layer, hot in enumerate(placement.hot):
            if rank < len(hot):
                yield ExpertKey(LayerIndex(layer), ExpertIndex(hot[rank]))
