"""Builds the device of hot experts with store, staging, promotion, dispatcher and backend, and fills it.

Loads torch only for a GPU. Knows no stage.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from thermocline.experts.backends.full_device import FullDevice
from thermocline.experts.backends.on_device import DeviceExpertBackend
from thermocline.experts.backends.simulated import CopyEngine, SimulatedDevice, SlowedKernels
from thermocline.experts.backends.slot_memory import SlotMemory
from thermocline.experts.backends.streamed_device import StreamedDevice
from thermocline.experts.backends.trial import SimulatedTrial, measure_costs
from thermocline.experts.cache.lent_room import LentRoom
from thermocline.experts.cache.look_ahead import LookAhead
from thermocline.experts.cache.policy import SegmentedLruPolicy, StaticCache, chances
from thermocline.experts.cache.promotion import PromotionThread
from thermocline.experts.cache.staging import StagingRing
from thermocline.experts.cache.store import ExpertStore
from thermocline.experts.dispatch.dispatcher import CacheDispatcher
from thermocline.experts.dispatch.offload_selector import ChunkTimes, OffloadSelector
from thermocline.experts.dispatch.split_rules import FastestSplit, LinkState, OnlyResident
from thermocline.experts.dispatch.streaming import LinkPauses
from thermocline.experts.placement.upload_slots import (
    MAX_STAGED,
    num_lacking,
    num_staged_slots,
    num_streamed_slots,
)
from thermocline.kernels.cpu_topology import default_threads
from thermocline.kernels.expert_parts import StreamPart
from thermocline.kernels.gpu.formats import DEVICE_FORMATS
from thermocline.messages import ExpertKey, LayerIndex
from thermocline.traces.lanes import Lane
from thermocline.workers.lane import LaneThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    import torch
    from numpy.typing import NDArray

    from thermocline.config import PlacementConfig
    from thermocline.costmodel.expert_costs import ExpertCosts
    from thermocline.experts.backends.expert_feed import ExpertFeed
    from thermocline.experts.backends.gpu import GpuDevice
    from thermocline.experts.backends.trial import Trial
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.experts.dispatch.split_rules import SplitRule
    from thermocline.experts.placement.lent_segments import LentSegments
    from thermocline.experts.placement.placement import Placement
    from thermocline.experts.placement.slots import LayoutSlots
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.traces.recorder import Recorder


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """A model's experts, which of them are hot at first, and what computes the others.

    num_used: experts of a token. kernels: the CPU's, with so many threads. remote_mask: bool [layers, experts], what
    workers compute; None without any.
    """

    catalog: ExpertCatalog
    placement: Placement
    num_used: int
    kernels: Kernels
    threads: int
    remote_mask: NDArray[np.bool_] | None = None
    kept_away: NDArray[np.bool_] | None = None
    """bool [layers, experts], what the user keeps on the CPU."""
    warmth: NDArray[np.float64] | None = None
    """How often each was chosen in earlier runs, [layers, experts]; None where that is not known."""
    select: Callable[[Mapping[str, int]], Placement] | None = None
    """Selects what a GPU holds at first, of so many experts of each layout, with those of `placement`; None for no others."""


@dataclass(frozen=True, slots=True)
class HotDevice:
    """A device with its experts, and who uses them.

    policy: decides which experts come. lane: where it computes; lanes: those that were started for it. full: where all
    experts may be resident; streamed: where those that are not can be copied for a prompt alone. room: what they share with the KV cache.
    """

    device: SimulatedDevice | GpuDevice
    catalog: ExpertCatalog
    store: ExpertStore
    policy: StaticCache | SegmentedLruPolicy
    ring: StagingRing
    ahead: LookAhead
    dispatcher: CacheDispatcher
    backend: DeviceExpertBackend
    lane: LaneThread
    lanes: tuple[LaneThread, ...]
    costs: tuple[ExpertCosts | None, ...] = ()
    full: FullDevice | None = None
    streamed: StreamedDevice | None = None
    room: LentRoom | None = None


@dataclass(frozen=True, slots=True)
class OpenGpu:
    """An open GPU: its streams, and the lane of its compute. arena: what experts and the KV cache have in common.

    is_whole: it has all non-expert weights.
    """

    streams: DeviceStreams
    lane: LaneThread
    arena: torch.Tensor | None = None
    is_whole: bool = False

    @property
    def records_steps(self) -> bool:
        """Whether it computes whole decode steps, which are recorded."""
        return self.is_whole and self.streams.can_capture


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """What experts have of a GPU. slots: by layout, for experts that stay; num_staged: for uploads, beside them.

    lockable_bytes: of the host's memory, that may be locked. is_in_memory: whether all pages of the experts are there.
    lent: of the cache, which begins `cache_start` bytes into the arena.
    """

    slots: Mapping[str, LayoutSlots]
    num_staged: int
    lockable_bytes: int = 0
    is_in_memory: bool = False
    lent: LentSegments | None = None
    cache_start: int = 0


def build_simulated_device(
    config: PlacementConfig,
    experts: RoutedExperts,
    kernels: Kernels,
    recorder: Recorder,
    owned: ExitStack,
) -> HotDevice:
    """Return a simulated device that computes with `kernels`, slowed down as configured; `owned` closes it."""
    catalog = experts.catalog
    layers = catalog.routed_layers
    copies = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
    lane = owned.enter_context(LaneThread(Lane.HOT, recorder))
    engine = CopyEngine(copies, config.simulated_copy_bytes_per_s, recorder)
    slowdown = config.simulated_slowdown
    slowed = kernels if slowdown == 1 else SlowedKernels(kernels, slowdown)
    device = SimulatedDevice(catalog, config.simulated_memory_bytes, slowed, lane, engine)
    num_staged, capacity_bytes = _simulated_slots(config, catalog)
    trial = SimulatedTrial(
        catalog,
        experts.kernels,
        slowed,
        lane,
        config.simulated_copy_bytes_per_s,
        has_own_core=experts.threads < default_threads(),
    )
    empty = _EmptyDevice(device, layers, capacity_bytes, num_staged, trial, lane, (copies, lane))
    return _fill(empty, config, experts, recorder, owned)


def build_gpu_device(
    config: PlacementConfig,
    experts: RoutedExperts,
    gpu: OpenGpu,
    given: ExpertMemory,
    recorder: Recorder,
    owned: ExitStack,
) -> HotDevice:
    """Return a GPU with experts; `owned` closes it.

    given: as allocated, with the catalog's layouts. Raises DeviceMemoryError where it can not be had, and
    DeviceFaultError where the GPU's outputs differ from the CPU's.
    """
    from thermocline.experts.backends.expert_copies import ExpertCopies
    from thermocline.experts.backends.gpu import GpuDevice
    from thermocline.experts.backends.gpu_trial import GpuTrial

    catalog = experts.catalog
    layers = device_layers(catalog)
    lent = given.lent
    segments = () if lent is None else tuple(lent.ranges(given.cache_start))
    memory = SlotMemory(given.slots, given.num_staged, segments)
    copies = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
    largest = max(slots.expert_bytes for slots in given.slots.values())
    mover = ExpertCopies(gpu.streams, copies, largest, recorder)
    if sum(catalog.num_experts * catalog.expert_bytes(n) for n in layers) <= given.lockable_bytes:
        lock = mover.lock if given.is_in_memory else mover.lock_after
        lock({layer: catalog.stack(layer) for layer in layers})
    device = GpuDevice(catalog, tuple(layers), memory, gpu.streams, gpu.lane, mover, gpu.arena)
    is_static = config.expert_cache == "static"
    slots: list[int] = []
    feed, bulk = device.feed(mover, recorder), None
    if gpu.is_whole and not is_static and _may_all_come(experts, layers):
        slots = memory.take_spare(num_streamed_slots(given.num_staged))
        if slots and mover.has_locked(layers):
            bulk = partial(_copy_some, feed, slots, catalog.num_experts)
    counts_steps = gpu.records_steps and not is_static
    trial = GpuTrial(
        device, catalog, experts.kernels, experts.threads, gpu.lane, counts_steps, bulk
    )
    if is_static:
        trial.check(layers[0])
    shares = memory.shares()
    empty = _EmptyDevice(
        *(device, layers, sum(shares.values()), given.num_staged - len(slots), trial, gpu.lane),
        (copies,),
        *(shares, gpu.records_steps),
    )
    hot = _fill(empty, config, experts, recorder, owned)
    if lent is not None:
        hot = replace(hot, room=LentRoom(lent, memory, hot.store))
    num_experts = Counter[str]()
    for layer in layers:
        num_experts[catalog.layout(layer)] += catalog.num_experts
    has_all = all(slots.count == num_experts[name] for name, slots in given.slots.items())
    if has_all and layers == catalog.routed_layers:
        hot = replace(hot, full=FullDevice(hot.store, device.resident()))
    if slots:
        streamed = StreamedDevice(
            hot.store,
            device.streamed(feed),
            slots,
            hot.costs,
            experts.num_used,
            partial(mover.has_locked, frozenset(layers)),
        )
        hot = replace(hot, streamed=streamed)
    return hot


def _copy_some(feed: ExpertFeed, slots: Sequence[int], num_experts: int, layer: LayerIndex) -> int:
    """Copy a layer's first experts to these slots, wait for them, and return how many."""
    number = min(len(slots), num_experts)
    first = np.arange(number, dtype=np.int32)
    feed.copy(StreamPart(layer, first, np.array(slots[:number], np.int32)))
    return number


def _may_all_come(experts: RoutedExperts, layers: Sequence[LayerIndex]) -> bool:
    """Whether every expert of the model may be on the device: each has a format of its, and nobody keeps one elsewhere."""
    kept_away = experts.kept_away is not None and bool(experts.kept_away.any())
    return list(layers) == list(experts.catalog.routed_layers) and not (
        kept_away or experts.remote_mask is not None
    )


def device_layers(catalog: ExpertCatalog) -> list[LayerIndex]:
    """Return the layers whose experts are of formats that a GPU's kernels read."""
    found = []
    for layer in catalog.routed_layers:
        stack = catalog.stack(layer)
        names = {part.format.name for part in stack.parts}
        if names <= DEVICE_FORMATS:
            found.append(layer)
    return found


@dataclass(frozen=True, slots=True)
class _EmptyDevice:
    """A device without experts. layers: whose experts may come; capacity_bytes: for experts that stay;
    num_staged: slots for uploads besides. shares: of the capacity, by layout, where slots have one. records_steps: see
    `OpenGpu`.
    """

    device: SimulatedDevice | GpuDevice
    layers: Sequence[LayerIndex]
    capacity_bytes: int
    num_staged: int
    trial: Trial
    lane: LaneThread
    lanes: tuple[LaneThread, ...]
    shares: Mapping[str, int] | None = None
    records_steps: bool = False


def _fill(
    empty: _EmptyDevice,
    config: PlacementConfig,
    experts: RoutedExperts,
    recorder: Recorder,
    owned: ExitStack,
) -> HotDevice:
    """Copy the first experts to a device, and return it with its cache."""
    catalog, device, allowed = experts.catalog, empty.device, frozenset(empty.layers)
    every_layer = map(LayerIndex, range(catalog.num_layers))
    sizes = [catalog.expert_bytes(n) if n in allowed else 0 for n in every_layer]
    is_static = config.expert_cache == "static"
    costs: tuple[ExpertCosts | None, ...] = ()
    policy: StaticCache | SegmentedLruPolicy
    if is_static:
        policy = StaticCache(sizes)
    else:
        costs = measure_costs(catalog, allowed, experts.kernels, empty.trial)
        policy = _cache_policy(empty, experts, costs)
    store = ExpertStore(sizes, catalog.num_experts, device, policy, empty.capacity_bytes, recorder)
    ring = StagingRing(device, empty.num_staged, store.give_up)
    ahead, pauses = LookAhead(ring), LinkPauses(time.perf_counter)
    last_layer = LayerIndex(max((n for n, nbytes in enumerate(sizes) if nbytes), default=0))
    first = tuple(key for key in _by_rank(experts.placement) if key.layer in allowed)
    if experts.kept_away is not None:
        store.bind(first, experts.kept_away)
    store.install(first)
    if experts.select is not None and empty.shares is not None and not (is_static or policy.reason):
        room = {one.layout: empty.shares[one.layout] // one.nbytes for one in costs if one}
        asked = frozenset(first)
        store.install(key for key in _by_rank(experts.select(room)) if key not in asked)
    rule: SplitRule = OnlyResident()
    min_upload_tokens, times = inf, None
    if not is_static:
        link = LinkState(lambda: ring.num_copying, pauses.seconds, ring.max_ahead)
        rule = fastest = FastestSplit(costs, experts.num_used, link)
        promises = partial(
            fastest.promises,
            num_experts=catalog.num_experts,
            resident_share=min(1.0, empty.capacity_bytes / max(catalog.total_bytes, 1)),
        )
        times = ChunkTimes(OffloadSelector(promises), last_layer, time.perf_counter)
        min_upload_tokens = fastest.min_upload_tokens(catalog.num_experts)
        owned.enter_context(PromotionThread(store))
    dispatcher = CacheDispatcher(store, rule, min_upload_tokens, experts.remote_mask, times, ahead)
    backend = DeviceExpertBackend(store, device, ahead, pauses)
    return HotDevice(
        *(
            device,
            catalog,
            store,
            policy,
            ring,
            ahead,
            dispatcher,
            backend,
            empty.lane,
            empty.lanes,
        ),
        costs,
    )


def _cache_policy(
    empty: _EmptyDevice, experts: RoutedExperts, costs: Sequence[ExpertCosts | None]
) -> SegmentedLruPolicy:
    """Return a policy that begins with what is known of earlier runs."""
    if empty.records_steps:
        costs = [one and one.in_recorded_steps() for one in costs]
    policy = SegmentedLruPolicy(
        costs, experts.catalog.num_experts, empty.capacity_bytes, num_used=experts.num_used
    )
    if empty.shares is not None:
        policy.resize(empty.capacity_bytes, empty.shares)
    if experts.warmth is not None:
        for layer in empty.layers:
            warmth = experts.warmth[layer]
            if experts.kept_away is not None:
                warmth = warmth * ~experts.kept_away[layer]
            policy.warm(layer, chances(warmth, experts.num_used))
    return policy


def _simulated_slots(config: PlacementConfig, catalog: ExpertCatalog) -> tuple[int, int]:
    """Return how many slots for uploads a simulated device has, and the bytes of experts that stay.

    A configured budget is for those alone.
    """
    layers, memory = catalog.routed_layers, config.simulated_memory_bytes
    largest = max(map(catalog.expert_bytes, layers), default=0)
    budget, per_layer = config.expert_budget_bytes, catalog.num_experts
    resident = memory if budget is None else min(memory, budget)
    if config.expert_cache == "static" or not largest:
        return 1, resident
    wanted = sum(per_layer * catalog.expert_bytes(layer) for layer in layers)
    if budget is not None:
        most = (memory - resident) // largest
        return max(MAX_STAGED, min(num_lacking(resident, wanted, per_layer), most)), resident
    num_staged = num_staged_slots(memory, largest, wanted, per_layer)
    return num_staged, max(memory - num_staged * largest, 0)


def _by_rank(placement: Placement) -> Iterator[ExpertKey]:
    """Yield a placement's experts: the first of every layer, then the second of every layer, and so on."""
    for rank in range(placement.num_experts):
        for layer, hot in enumerate(placement.hot):
            if rank < len(hot):
                yield ExpertKey.of(layer, hot[rank])
