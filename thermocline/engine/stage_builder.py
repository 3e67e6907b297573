"""Builds the stages of an engine, the graph of them, and the runner that executes it.

A part of the assembly. Knows no device, cache or scheduler from inside.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thermocline.engine.shared_step import build_shared_step
from thermocline.engine.whole_device import streamed_experts, whole_model_experts
from thermocline.experts.routing_observer import RoutingObserver
from thermocline.messages import LayerIndex
from thermocline.pipeline.execution.graph import moe_graph
from thermocline.pipeline.execution.policy import Load
from thermocline.pipeline.execution.runner import FusedStages, Runner
from thermocline.speculation.layer_tap import LayerTap
from thermocline.stages.attend import AttendStage, DividedAttendStage
from thermocline.stages.combine import CombineStage
from thermocline.stages.embed import EmbedStage
from thermocline.stages.fused_layer import FusedLayerStage
from thermocline.stages.fused_model import FusedModelStage
from thermocline.stages.fused_step import FusedStepStage
from thermocline.stages.head import HeadStage
from thermocline.stages.prefetch import PrefetchStage
from thermocline.stages.router import RouterStage, routing_of
from thermocline.stages.tapped import TappedStage
from thermocline.traces.lanes import Name
from thermocline.workers.lane import TimedLane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from thermocline.engine.build_context import BuildContext
    from thermocline.engine.devices import Devices
    from thermocline.engine.expert_stages import ExpertBackends
    from thermocline.experts.backends.full_device import FullDevice, NoExperts
    from thermocline.experts.backends.hot_device import HotDevice
    from thermocline.experts.backends.streamed_device import StreamedDevice
    from thermocline.experts.routing_log import RoutingLog
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import Chunk, ChunkId, Hidden
    from thermocline.models.routing import Routed
    from thermocline.parallel.rank import RankMember
    from thermocline.speculation.contract import HiddenReader
    from thermocline.stages.contract import Stage
    from thermocline.stages.shared_model import SharedModelStage
    from thermocline.workers.lane import JobLane, LaneThread


def build_runner(
    context: BuildContext,
    experts: ExpertBackends,
    cache: SequenceCache,
    cpu: LaneThread,
    routing_log: RoutingLog,
    readers: Sequence[HiddenReader] = (),
) -> Runner:
    """Return the runner of all stages. cache: the CPU's, of layers whose non-expert weights are on no device.

    readers: drafters that read what the last layer gives.
    """
    config, model, dispatcher = context.config, context.model, experts.dispatcher
    num_layers, device = model.spec.num_layers, experts.hot_device
    non_expert, device_layers = context.devices.non_expert, context.devices.device_layers
    observer = RoutingObserver(
        experts.initial_placement.heat,
        routing_log,
        None if device is None else device.store,
        LayerIndex(num_layers - 1),
        experts.layer_hits,
    )
    room = None if device is None else device.room
    timed, non_expert_lane = _lanes(context.devices, experts, cpu)
    router = partial(RouterStage, dispatcher=dispatcher, observer=observer)
    tapped = {layer for reader in readers for layer in reader.facts.reads_layers}
    tap = LayerTap(tapped) if tapped else None
    stages: dict[str, Stage[Any, Any]] = {
        "embed": EmbedStage(model, cpu, reads_ahead=experts.governor is not None),
        "combine": CombineStage(context.kernels.dense, timed),
        **_non_expert_stages(
            context, cache, router, (timed, non_expert_lane), (readers, tap), experts.member
        ),
        **experts.stages,
    }
    # A job of all layers gives nobody what single layers get.
    shared = None
    if tap is None:
        shared = build_shared_step(context, device, cache, observer, cpu)
    fused = FusedStages(num_layers, shared=shared)
    there = whole_model_experts(context, device)
    streamed = streamed_experts(context, device)
    if tap is not None or experts.member is not None:
        streamed = None
    if non_expert is not None and device_layers:
        model_stage = partial(FusedModelStage, non_expert, observer=observer, lane=non_expert_lane)
        fused = FusedStages(
            num_layers,
            model=None if there is None else model_stage(there),
            streamed=None if streamed is None else model_stage(streamed, on_done=streamed.note),
            shared=shared,
        )
    elif model.has_whole_layers:
        hints = experts.stages.get("prefetch")
        assert hints is None or isinstance(hints, PrefetchStage), "nothing else takes hints"
        layer: Stage[Hidden, Hidden] = FusedLayerStage(
            model, cache, dispatcher, observer, cpu, hints, context.kernels.give_back_memory
        )
        step = None
        if tap is not None:
            layer = TappedStage(layer, tap)
        elif model.has_whole_steps:
            step = FusedStepStage(model, cache, dispatcher, observer, cpu)
        fused = FusedStages(num_layers, layer=layer, step=step, shared=shared)
    return Runner(
        # One more credit than prompts take: a decode step finds one, always.
        moe_graph(stages, num_layers, context.limits.max_prompt_chunks + 1, device_layers),
        context.recorder,
        cpu,
        _load(
            experts,
            fused,
            shared,
            (there, streamed),
            has_experts=model.spec.has_experts,
            attends_here=not device_layers,
            may_overlap=config.scheduler.overlap,
        ),
        fused,
        before_start=_nothing if room is None else room.until_free,
        on_end=_ended(device, tap),
    )


def _ended(device: HotDevice | None, tap: LayerTap | None) -> Callable[[ChunkId], None]:
    """Return what to do when a chunk has ended."""
    found = [] if device is None else [device.backend.forget]
    if tap is not None:
        found.append(tap.forget)

    def ended(chunk: ChunkId) -> None:
        for each in found:
            each(chunk)

    return ended


def _nothing(*_: ChunkId) -> None:
    """Do nothing."""


def _load(
    experts: ExpertBackends,
    fused: FusedStages,
    shared: SharedModelStage | None,
    on_device: tuple[FullDevice | NoExperts | None, StreamedDevice | None],
    *,
    has_experts: bool,
    attends_here: bool,
    may_overlap: bool,
) -> Callable[[Chunk], Load]:
    """Return what tells the policy about a chunk: facts that stay, and those of the moment.

    on_device: the experts of chunks that one device computes alone. Without experts, hints are about prompts alone.
    """
    full, streamed = on_device
    device, governor, dispatcher = experts.hot_device, experts.governor, experts.dispatcher
    # Workers that were asked for compute their experts, always; --hot-device cpu computes its own apart.
    is_remote = experts.remote is not None and experts.balancer is None
    is_fusable = not is_remote and ("hot" not in experts.stages or device is not None)
    member = experts.member
    may_offload = device is not None or experts.remote is not None
    takes_steps = is_fusable and member is None and experts.remote is None

    def takes_step(chunk: Chunk, *, offloads: bool) -> bool:
        if shared is None or not takes_steps or not shared.takes(chunk):
            return False
        # A device with the whole cache attends anyway, and its layers one by one wait for the host at every step.
        return not attends_here or (offloads and shared.has_experts)

    def load(chunk: Chunk) -> Load:
        offloads = may_offload and not dispatcher.is_left_to_cpu(chunk.num_tokens)
        is_shared = member is not None and not member.computes_alone(chunk.id)
        return Load(
            device_has_model=full is not None and full.is_full,
            device_streams=chunk.is_prompt
            and streamed is not None
            and streamed.takes(chunk.num_tokens),
            device_takes_step=takes_step(chunk, offloads=offloads),
            layers_are_fusable=fused.layer is not None and is_fusable and not is_shared,
            steps_are_fusable=fused.step is not None,
            other_lanes_have_work=offloads or is_remote or is_shared or not attends_here,
            hints_are_wanted=governor is not None
            and (has_experts or chunk.is_prompt)
            and not governor.looks_quiet(),
            may_overlap=may_overlap,
        )

    return load


def _lanes(devices: Devices, experts: ExpertBackends, cpu: LaneThread) -> tuple[JobLane, JobLane]:
    """Return the CPU's lane for what is computed beside experts, and that of the non-expert weights."""
    timed: JobLane = cpu
    if experts.balancer is not None:
        timed = TimedLane(cpu, experts.balancer.observe_local_other)
    if devices.non_expert is None or devices.gpu is None:
        return timed, timed
    return timed, devices.gpu.lane


def _non_expert_stages(
    context: BuildContext,
    cache: SequenceCache,
    router: Callable[..., RouterStage],
    lanes: tuple[JobLane, JobLane],
    reading: tuple[Sequence[HiddenReader], LayerTap | None],
    member: RankMember | None,
) -> dict[str, Stage[Any, Any]]:
    """Return attention, routing and head of each side. lanes: the CPU's, and that of the device's part. reading: drafters
    that read what layers give, and what keeps it for them. member: this process as one of several ranks.
    """
    model, non_expert = context.model, context.devices.non_expert
    there, num_layers = context.devices.device_layers, model.spec.num_layers
    here, device = lanes
    stages: dict[str, Stage[Any, Any]] = {
        "head": HeadStage(model, here, model.final_norm, *reading)
    }
    if len(there) < num_layers:
        attend: Stage[Hidden, Hidden] = AttendStage(model, cache, here)
        if member is not None:
            attend = DividedAttendStage(model, cache, here, member)
        stages["attend"] = attend if reading[1] is None else TappedStage(attend, reading[1])
        stages["router"] = router(routing_of(model), lane=here)
    if non_expert is None:
        return stages
    if non_expert.part.has_head:
        stages["head"] = HeadStage(non_expert, device, model.final_norm, *reading, here)
    if there:

        def attend_and_route(hidden: Hidden) -> Routed:
            return non_expert.attend_and_route(hidden.layer, hidden.chunk, hidden.x)

        stages["attend_device"] = router(attend_and_route, lane=device, name=Name.ATTEND)
    return stages
