"""Builds the branches that compute a model's experts: hot, cold, remote, and what reads ahead for them.

A part of the assembly. Knows neither trunk nor pipeline.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.compute import CpuExpertCompute
from thermocline.experts.device_opening import RoutedExperts, open_simulated
from thermocline.experts.placement import placement_fingerprint
from thermocline.experts.tiers import FixedTiers
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex, Tier
from thermocline.prefetch.opening import open_governor
from thermocline.remote.balance import Balance
from thermocline.remote.runtime import OpenedModel, open_remote
from thermocline.remote.shares import assign_experts
from thermocline.stages.cold import ColdStage
from thermocline.stages.hot import HotStage
from thermocline.stages.prefetch import PrefetchStage
from thermocline.stages.remote import RemoteStage

if TYPE_CHECKING:
    from contextlib import ExitStack
    from typing import Any

    from numpy.typing import NDArray

    from thermocline.config import EngineConfig
    from thermocline.experts.device_opening import HotDevice
    from thermocline.experts.opening import ExpertStart
    from thermocline.experts.tiers import Tiers
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.lane import LaneThread
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.prefetch.governor import PrefetchGovernor
    from thermocline.remote.compute import RemoteExpertCompute
    from thermocline.stages.contract import Stage
    from thermocline.traces.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Ground:
    """What all parts of an engine are built on. owned: closes what is opened, the last first."""

    config: EngineConfig
    file: ModelFile
    model: Model
    kernels: Kernels
    recorder: Recorder
    owned: ExitStack


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBranches:
    """Who computes which experts.

    stages: cold, and as wanted hot, remote and prefetch. hot_mask: bool [layers, experts], the hot ones at
    first. hot_device: where hot experts compute, unless it is the CPU.
    """

    stages: dict[str, Stage[Any, Any]]
    tiers: Tiers
    hot_mask: NDArray[np.bool_]
    hot_device: HotDevice | None
    remote: RemoteExpertCompute | None
    governor: PrefetchGovernor | None
    lanes: tuple[LaneThread, ...]

    def leave_to_cpu(self, num_tokens: int) -> bool:
        """Whether a chunk of so many tokens has nothing for a device to do, and nothing is read ahead now."""
        device = self.hot_device
        return (device is None or device.tiers.leave_to_cpu(num_tokens)) and (
            self.governor is None or self.governor.is_quiet
        )


def make_kernels(config: EngineConfig, threads: int | None = None) -> Kernels:
    """Return the CPU's kernels; threads: instead of the config's. Raises ConfigError or NativeModuleError."""
    if config.kernels == "reference":
        return ReferenceKernels()
    cpu = config.cpu
    return NativeKernels(cpu.isa, threads or cpu.threads, pin=cpu.pin)


def open_branches(ground: Ground, start: ExpertStart, cpu: LaneThread) -> ExpertBranches:
    """Open what computes the experts, placed as `start` says. Raises ConfigError or RemoteError."""
    config, spec, placement = ground.config, ground.model.spec, start.placement
    catalog = ExpertCatalog(ground.model.expert_layers)
    hot_mask = np.array([placement.hot_mask(LayerIndex(n)) for n in range(spec.num_layers)])
    workers = config.remote.workers
    assignment = assign_experts(hot_mask, len(workers), config.remote.share, spec.num_dense_layers)
    experts = RoutedExperts(
        catalog,
        placement,
        spec.router.num_experts_used,
        ground.kernels,
        placement_fingerprint(spec, placement),
        assignment.mask if workers else None,
        start.kept_away,
    )
    balance = Balance(len(workers)) if workers and config.remote.mode == "auto" else None

    def cpu_experts(tier: Tier) -> CpuExpertCompute:
        told = None if balance is None else balance.observe_here
        return CpuExpertCompute(tier, experts.fingerprint, catalog, ground.kernels, cpu, told)

    stages: dict[str, Stage[Any, Any]] = {"cold": ColdStage(cpu_experts(Tier.COLD))}
    device = _hot_device(ground, experts)
    if config.placement.has_hot_tier:
        stages["hot"] = HotStage(cpu_experts(Tier.HOT) if device is None else device.compute)
    remote = None
    if workers:
        here = cpu_experts(Tier.REMOTE)
        opened = OpenedModel(
            ground.file, ground.model, config.cpu.isa, experts.fingerprint, here, balance
        )
        remote = ground.owned.enter_context(
            closing(open_remote(config.remote, opened, assignment, ground.recorder))
        )
        stages["remote"] = RemoteStage(remote)
    governor = _governor(ground, catalog, hot_mask | assignment.mask)
    if governor is not None:
        stages["prefetch"] = PrefetchStage(governor, spec.router)
    tiers = FixedTiers(placement, experts.remote_mask) if device is None else device.tiers
    lanes = () if device is None else device.lanes
    return ExpertBranches(stages, tiers, hot_mask, device, remote, governor, lanes)


def _hot_device(ground: Ground, experts: RoutedExperts) -> HotDevice | None:
    wanted = ground.config.placement
    if wanted.hot_device != "simulated" or wanted.expert_cache == "off":
        return None
    # The hot tier's arithmetic is the cold one's: the same kernels, on a thread of the device's own.
    kernels = make_kernels(ground.config, threads=1)
    return open_simulated(wanted, experts, kernels, ground.recorder, ground.owned)


def _governor(
    ground: Ground, catalog: ExpertCatalog, elsewhere: NDArray[np.bool_]
) -> PrefetchGovernor | None:
    """elsewhere: bool [layers, experts], those that are not computed from this process's file."""
    mode = ground.config.prefetch.mode
    if mode == "off":
        return None
    governor = open_governor(
        ground.file, ground.model, catalog, elsewhere, ground.recorder, probes=mode == "auto"
    )
    return ground.owned.enter_context(closing(governor))
