"""Opens the expert backends, their stages, and what reads experts ahead.

A part of the assembly. Knows nothing of non-expert weights or of the pipeline.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from thermocline.engine.cpu import make_kernels
from thermocline.engine.expert_placement import place_experts
from thermocline.engine.mesh_builder import open_member
from thermocline.engine.warm_up import warm_up_devices
from thermocline.errors import ConfigError
from thermocline.experts.backends.cpu import CpuExpertBackend
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.dispatch.dispatcher import StaticDispatcher
from thermocline.experts.dispatch.offload_selector import ChunkTimes, OffloadSelector
from thermocline.experts.layer_hits import LayerHits
from thermocline.messages import BackendRole, LayerIndex
from thermocline.parallel.backend import MeshExpertBackend
from thermocline.parallel.dispatcher import RankDispatcher
from thermocline.prefetch.governor_builder import build_governor
from thermocline.remote.load_balancer import WorkerLoadBalancer
from thermocline.remote.runtime import OpenedModel, open_remote
from thermocline.stages.experts import ExpertStage
from thermocline.stages.prefetch import PrefetchStage

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.engine.build_context import BuildContext
    from thermocline.engine.devices import Devices
    from thermocline.engine.expert_placement import PlacedExperts
    from thermocline.experts.backends.contract import ExpertBackend
    from thermocline.experts.backends.hot_device import HotDevice
    from thermocline.experts.dispatch.dispatcher import ExpertDispatcher
    from thermocline.experts.placement.initial import InitialPlacement
    from thermocline.experts.placement.placement import Placement
    from thermocline.parallel.rank import RankMember
    from thermocline.prefetch.governor import PrefetchGovernor
    from thermocline.remote.compute import RemoteExpertBackend
    from thermocline.stages.contract import Stage
    from thermocline.workers.lane import LaneThread


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBackends:
    """What computes which experts.

    devices: after fallbacks. stages: cold, and as wanted hot, remote and prefetch. hot_mask: bool [layers, experts],
    the initial hot experts. hot_device: where hot experts compute, None on the CPU. balancer: decides how much
    workers get; None where the config decides. member: this process as a rank, where several share the model.
    """

    initial_placement: InitialPlacement
    devices: Devices
    stages: dict[str, Stage[Any, Any]]
    dispatcher: ExpertDispatcher
    hot_mask: NDArray[np.bool_]
    hot_device: HotDevice | None
    remote: RemoteExpertBackend | None
    balancer: WorkerLoadBalancer | None
    governor: PrefetchGovernor | None
    member: RankMember | None = None
    layer_hits: LayerHits = field(default_factory=LayerHits)

    @property
    def placement(self) -> Placement:
        """Which experts are hot now."""
        device = self.hot_device
        return self.initial_placement.placement if device is None else device.store.placement()


def open_expert_backends(context: BuildContext, cpu: LaneThread) -> ExpertBackends:
    """Open what computes the experts. Raises ConfigError, RemoteError, and what `place_experts` raises."""
    config, spec = context.config, context.model.spec
    if config.remote.workers and not spec.has_experts:
        raise ConfigError(
            "the model has no routed experts, which are what workers compute: leave out --expert-worker"
        )
    catalog = ExpertCatalog(context.model.expert_layers)
    placed = place_experts(context, catalog)
    member = open_member(context, catalog, cpu, placed.initial.known)
    if member is not None:
        return _on_ranks(context, catalog, placed, member, cpu)
    wanted, experts, device = placed.devices.placement, placed.routed, placed.hot_device
    workers, assignment = config.remote.workers, placed.assignment
    balancer = (
        WorkerLoadBalancer(len(workers)) if workers and config.remote.mode == "auto" else None
    )

    # What workers are given is decided layer by layer: any of their experts may be computed here.
    elsewhere = placed.hot_mask if balancer is not None else placed.hot_mask | assignment.mask
    governor = _governor(context, catalog, elsewhere)

    def cpu_experts(role: BackendRole) -> CpuExpertBackend:
        on_timed = None if balancer is None else balancer.observe_local_experts
        return CpuExpertBackend(
            role, catalog, context.kernels, cpu, on_timed, reads_ahead=_reads_ahead(governor)
        )

    backends: dict[BackendRole, ExpertBackend] = {BackendRole.COLD: cpu_experts(BackendRole.COLD)}
    if device is not None:
        backends[BackendRole.HOT] = device.backend
    elif wanted.hot_device == "cpu" and wanted.has_hot_tier:
        backends[BackendRole.HOT] = cpu_experts(BackendRole.HOT)
    remote = None
    if workers:
        fallback = cpu_experts(BackendRole.REMOTE)
        opened = OpenedModel(context.file, context.model, config.cpu.isa, fallback, balancer)
        remote = context.owned.enter_context(
            closing(open_remote(config.remote, opened, assignment, context.recorder))
        )
        backends[BackendRole.REMOTE] = remote
    stages: dict[str, Stage[Any, Any]] = {
        role: ExpertStage(role, backend) for role, backend in backends.items()
    }
    if governor is not None:
        here = (BackendRole.COLD,) if balancer is None else (BackendRole.COLD, BackendRole.REMOTE)
        stages["prefetch"] = PrefetchStage(governor, spec.router, here)
    times = None
    if balancer is not None and device is None:
        last_layer = LayerIndex(spec.num_layers - 1)
        times = ChunkTimes(OffloadSelector(), last_layer, time.perf_counter)
    dispatcher: ExpertDispatcher = StaticDispatcher(experts.placement, experts.remote_mask, times)
    if device is not None:
        dispatcher = device.dispatcher
    ready = warm_up_devices(context, device)
    return ExpertBackends(
        placed.initial,
        replace(placed.devices, reasons=(*placed.devices.reasons, *ready)),
        stages,
        dispatcher,
        placed.hot_mask,
        device,
        remote,
        balancer,
        governor,
    )


def _on_ranks(
    context: BuildContext,
    catalog: ExpertCatalog,
    placed: PlacedExperts,
    member: RankMember,
    cpu: LaneThread,
) -> ExpertBackends:
    """Return the backends of one rank of several: every pair goes through the exchange, also those computed here."""
    governor = _governor(context, catalog, ~member.owned_mask)
    backend = CpuExpertBackend(
        BackendRole.COLD, catalog, context.kernels, cpu, reads_ahead=_reads_ahead(governor)
    )
    stages: dict[str, Stage[Any, Any]] = {
        BackendRole.COLD: ExpertStage(BackendRole.COLD, backend),
        BackendRole.REMOTE: ExpertStage(BackendRole.REMOTE, MeshExpertBackend(member)),
    }
    if governor is not None:
        roles = (BackendRole.COLD, BackendRole.REMOTE)
        stages["prefetch"] = PrefetchStage(governor, context.model.spec.router, roles)
    return ExpertBackends(
        placed.initial,
        placed.devices,
        stages,
        RankDispatcher(member, placed.routed.placement),
        placed.hot_mask,
        None,
        None,
        None,
        governor,
        member,
    )


def _reads_ahead(governor: PrefetchGovernor | None) -> Callable[[], bool]:
    """Return what tells whether experts are read from the file while others are computed."""
    return lambda: governor is not None and not governor.is_quiet


def _governor(
    context: BuildContext, catalog: ExpertCatalog, elsewhere: NDArray[np.bool_]
) -> PrefetchGovernor | None:
    """elsewhere: bool [layers, experts], those that are not computed from this process's file."""
    mode = context.config.prefetch.mode
    if mode == "off":
        return None
    governor = build_governor(
        context.file,
        context.model,
        make_kernels(context.config, threads=1),
        catalog,
        elsewhere,
        context.recorder,
        probes=mode == "auto",
    )
    return context.owned.enter_context(closing(governor))
