"""Builds the stage of decode steps that a device and the CPU share. A part of the assembly."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.engine.shared_step_check import LayerByLayer, check_shared_steps
from thermocline.engine.whole_device import no_resident_experts
from thermocline.experts.backends.simulated import SimulatedDevice
from thermocline.experts.cache.empty_store import EmptyStore
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.handoff import Handoff
from thermocline.messages import LayerIndex
from thermocline.models.device.simulated_step import SimulatedStep
from thermocline.stages.shared_model import SharedModelStage

if TYPE_CHECKING:
    from thermocline.engine.build_context import BuildContext
    from thermocline.experts.backends.hot_device import HotDevice
    from thermocline.experts.cache.empty_store import StepStore
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.kv.cache import SequenceCache
    from thermocline.models.contract import StepDevice
    from thermocline.models.device.non_expert import DeviceNonExpert
    from thermocline.workers.lane import LaneThread

# Larger steps read most experts anyway, and go stage by stage.
_MAX_ROWS = 8
_LOG: Final = logging.getLogger("thermocline.devices")


def build_shared_step(
    context: BuildContext,
    hot: HotDevice | None,
    cache: SequenceCache,
    observer: RoutingObserver,
    lane: LaneThread,
) -> SharedModelStage | None:
    """Return the stage; None where no device computes whole steps, or the CPU's kernels can not serve one.

    cache, lane: the CPU's.
    """
    kernels, spec, non_expert = context.kernels, context.model.spec, context.devices.non_expert
    if not isinstance(kernels, NativeKernels) or spec.cpu_only or not spec.has_experts:
        return None
    # The page has one size for all layers' choices.
    if spec.router.own_used or (hot is None and non_expert is None):
        return None
    handoff = Handoff(kernels, context.model.non_expert.layers, _MAX_ROWS)
    device: StepDevice | None = None
    store: StepStore = EmptyStore(spec.num_layers, spec.router.num_experts)
    if hot is not None:
        store = hot.store
    if non_expert is not None:
        device = _device_step(context, hot, non_expert, handoff, store)
    elif hot is not None:
        device = _simulated_step(context, hot, cache)
    if device is None:
        return None
    dispatcher = None if hot is None else hot.dispatcher
    return SharedModelStage(device, handoff, store, dispatcher, observer, lane)


def _device_step(
    context: BuildContext,
    hot: HotDevice | None,
    non_expert: DeviceNonExpert,
    handoff: Handoff,
    store: StepStore,
) -> StepDevice | None:
    """Return that of a device which has the non-expert weights, and may have experts; None where it comes out differently."""
    gpu, experts = context.devices.gpu, None if hot is None else hot.device
    if gpu is None or isinstance(experts, SimulatedDevice) or not non_expert.part.is_whole:
        return None
    from thermocline.models.device.shared_step import DeviceSharedStep

    if experts is None:
        resident = no_resident_experts(gpu.streams, context.model.spec)
    else:
        resident = experts.resident()
    device = DeviceSharedStep(non_expert, resident, gpu.streams, gpu.lane, context.recorder)
    if not gpu.streams.can_capture:
        return device
    catalog = ExpertCatalog(context.model.expert_layers) if hot is None else hot.catalog
    layers = LayerByLayer(non_expert, experts, catalog, context.kernels)
    residency = np.stack(store.hold())
    try:
        check_shared_steps(device, handoff, non_expert, layers, residency)
    except Exception as error:  # noqa: BLE001 - whatever it is, steps go stage by stage
        _LOG.warning(
            "decode steps are computed stage by stage, which is slower: %s: %s",
            *(type(error).__name__, error),
        )
        return None
    finally:
        store.let_go()
    return device


def _simulated_step(
    context: BuildContext, hot: HotDevice, cache: SequenceCache
) -> StepDevice | None:
    """Return that of a device that only plays one; None for another device."""
    device, catalog = hot.device, hot.catalog
    if not isinstance(device, SimulatedDevice) or not isinstance(device.kernels, NativeKernels):
        return None
    routed = frozenset(catalog.routed_layers)
    layers = map(LayerIndex, range(catalog.num_layers))
    slots = [device.stack(layer) if layer in routed else None for layer in layers]
    return SimulatedStep(
        context.model.non_expert,
        slots,
        cache,
        device.kernels,
        hot.lane,
        context.config.placement.simulated_copy_bytes_per_s,
        context.recorder,
    )
