"""What an engine has counted and recorded since it was opened, read from its parts into frozen records."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.experts.figures import ExpertFigures
from thermocline.experts.layer_hits import LayerHitStatistics
from thermocline.machine import bytes_read_from_storage, machine_facts
from thermocline.traces.events import ExpertUse, Trace
from thermocline.traces.lanes import Lane, Track
from thermocline.traces.ranks import CLOCK_OFFSET, RANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.engine.assembly import EngineParts
    from thermocline.experts.cache.store_statistics import StoreStatistics
    from thermocline.experts.placement.allocation import DeviceAllocation
    from thermocline.experts.placement.placement import Placement
    from thermocline.pipeline.execution.queues import ChannelStatistics
    from thermocline.pipeline.scheduling.request_spill import SpillStatistics
    from thermocline.prefetch.governor import PrefetchStatistics
    from thermocline.remote.compute import RemoteStatistics
    from thermocline.traces.events import Event


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since the engine was opened."""

    channels: tuple[ChannelStatistics, ...]
    heat: NDArray[np.int64]
    """Times each expert was chosen, [layers, experts]."""
    placement: Placement
    """Which experts are hot now."""
    prefetch: PrefetchStatistics | None
    placement_reasons: tuple[str, ...] = ()
    """Why the hot experts are hot."""
    store: StoreStatistics | None = None
    """Of the device with hot experts, where there is one."""
    remote: RemoteStatistics | None = None
    """What workers did; None without any."""
    device_reasons: tuple[str, ...] = ()
    """Why not more of the model is on a GPU."""
    layer_hits: LayerHitStatistics = field(default_factory=LayerHitStatistics)
    """Of decode steps: layers, and those whose experts were all hot."""
    allocation: DeviceAllocation | None = None
    """How the device's memory is divided; None without one."""
    kv_bytes_lent: int = 0
    """Of the device's cache, what experts have now."""
    drafts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By drafter: tokens that steps verified, and those of them that were right."""
    why_not_drafted: str | None = None
    """Why the latest draft was not verified, or there is none; None if it was."""
    spill: SpillStatistics | None = None
    """What the second tier of the prompt cache holds, and what came of it; None without one."""
    repeats: tuple[float, ...] | None = None
    """By layer, the share of a prompt's token's experts that the token before it chose too; None before any prompt."""

    @property
    def num_choices(self) -> int:
        """Times an expert was chosen for a token."""
        return int(self.heat.sum())

    @property
    def num_hot_choices(self) -> int:
        """Those of them that the hot tier computed."""
        if self.store is not None:
            return self.store.total_hits + self.store.total_staged
        return sum(
            int(row[list(ids)].sum())
            for row, ids in zip(self.heat, self.placement.hot, strict=True)
        )

    @property
    def hot_share(self) -> float:
        """Share of expert choices that fell on hot experts, 0 to 1."""
        return self.num_hot_choices / self.num_choices if self.num_choices else 0.0


def read_statistics(parts: EngineParts) -> EngineStatistics:
    """Return the counters so far."""
    experts = parts.experts
    governor, device, remote = experts.governor, experts.hot_device, experts.remote
    drafting, spilling = parts.step_loop.drafting, parts.step_loop.spilling
    return EngineStatistics(
        parts.runner.statistics(),
        experts.initial_placement.heat.counts(),
        experts.placement,
        None if governor is None else governor.statistics(),
        experts.initial_placement.reasons,
        None if device is None else device.store.statistics(),
        None if remote is None else remote.statistics(),
        experts.devices.reasons,
        experts.layer_hits.statistics(),
        experts.devices.allocation,
        0 if device is None or device.room is None else device.room.lent_bytes,
        {} if drafting is None else drafting.speculator.totals,
        None if drafting is None else drafting.speculator.why_off_now,
        None if spilling is None else spilling.statistics(),
        experts.initial_placement.heat.known().repeat_shares(),
    )


def read_expert_figures(parts: EngineParts) -> ExpertFigures:
    """Return what became of chosen experts so far."""
    experts, busy = parts.experts, read_busy_ns(parts)
    governor, device, remote = experts.governor, experts.hot_device, experts.remote
    counts, hot_mask = experts.initial_placement.heat.counts(), experts.hot_mask
    total, hot, upload_bytes = int(counts.sum()), int(counts[hot_mask].sum()), 0
    if device is not None:
        store = device.store.statistics()
        hot, upload_bytes = store.total_hits + store.total_staged, store.total_upload_bytes
    return ExpertFigures(
        hits=hot,
        misses=total - hot if device is not None or hot_mask.any() else 0,
        prefetched=0 if governor is None else governor.statistics().total_experts,
        cpu=total - hot - (0 if remote is None else remote.statistics().total_choices),
        bytes_h2d=upload_bytes,
        bytes_disk=bytes_read_from_storage(),
        cpu_ns=max((ns for track, ns in busy.items() if track.lane is Lane.CPU), default=0),
        device_ns=0 if device is None else busy.get(Track(device.lane.lane), 0),
        at_ns=time.perf_counter_ns(),
    )


def read_busy_ns(parts: EngineParts) -> dict[Track, int]:
    """Return how long each lane has worked since the engine was opened, in nanoseconds."""
    busy = {Track(Lane.LOOP): parts.step_loop.busy_ns()}
    for lane in parts.lanes:
        busy |= lane.busy_ns()
    if parts.experts.governor is not None:
        busy[Track(Lane.PAGECACHE)] = parts.experts.governor.busy_ns()
    if parts.step_loop.spilling is not None:
        busy[Track(Lane.SPILL)] = parts.step_loop.spilling.busy_ns()
    return busy


def make_trace(
    parts: EngineParts, events: Sequence[Event], read_bytes_per_s: float | None
) -> Trace:
    """Return the trace. read_bytes_per_s: what the machine can read, if that was measured."""
    spec, facts = parts.model.spec, machine_facts()
    metadata: dict[str, str | int | float] = {
        "model": spec.name,
        "architecture": spec.architecture,
        "machine": facts.cpu,
        "cores": facts.num_usable_cores,
        "thermocline": facts.versions["thermocline"],
    }
    if parts.footprint.token_bytes is not None:
        metadata["token_bytes"] = parts.footprint.token_bytes
    if read_bytes_per_s is not None:
        metadata["read_bytes_per_s"] = read_bytes_per_s
    experts = parts.experts
    if experts.member is not None:
        metadata |= {RANK: experts.member.rank, CLOCK_OFFSET: experts.member.clock_offset_ns}
    counts = tuple(tuple(row) for row in experts.initial_placement.heat.counts().tolist())
    return Trace(tuple(events), metadata, ExpertUse(counts, experts.placement.hot))
