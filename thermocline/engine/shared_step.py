"""Builds the stage of decode steps that a device and the CPU share. A part of the assembly."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.engine.shared_step_check import LayerByLayer, check_shared_steps
from thermocline.experts.backends.simulated import SimulatedDevice
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.handoff import Handoff
from thermocline.messages import LayerIndex
from thermocline.models.simulated_step import SimulatedStep
from thermocline.stages.shared_model import SharedModelStage

if TYPE_CHECKING:
    from thermocline.engine.build_context import BuildContext
    from thermocline.experts.backends.hot_device import HotDevice
    from thermocline.experts.routing_observer import RoutingObserver
    from thermocline.kv.cache import SequenceCache
    from thermocline.models.contract import StepDevice
    from thermocline.models.device_non_expert import DeviceNonExpert
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
    kernels, model = context.kernels, context.model
    if hot is None or not isinstance(kernels, NativeKernels) or model.spec.cpu_only:
        return None
    handoff = Handoff(kernels, model.non_expert.layers, _MAX_ROWS)
    non_expert = context.devices.non_expert
    device: StepDevice | None
    if non_expert is None:
        device = _simulated_step(context, hot, cache)
    else:
        device = _device_step(context, hot, non_expert, handoff)
    if device is None:
        return None
    return SharedModelStage(device, handoff, hot.store, hot.dispatcher, observer, lane)


def _device_step(
    context: BuildContext, hot: HotDevice, non_expert: DeviceNonExpert, handoff: Handoff
) -> StepDevice | None:
    """Return that of a device which has the non-expert weights, too; None where it comes out differently."""
    gpu, experts = context.devices.gpu, hot.device
    if gpu is None or isinstance(experts, SimulatedDevice) or not non_expert.part.is_whole:
        return None
    from thermocline.models.device_shared_step import DeviceSharedStep

    device = DeviceSharedStep(
        non_expert, experts.resident(), gpu.streams, gpu.lane, context.recorder
    )
    if not gpu.streams.can_capture:
        return device
    layers = LayerByLayer(non_expert, experts, hot.catalog, context.kernels)
    residency = np.stack(hot.store.hold())
    try:
        check_shared_steps(device, handoff, non_expert, layers, residency)
    except Exception as error:  # noqa: BLE001 - whatever it is, steps go stage by stage
        _LOG.warning(
            "decode steps are computed stage by stage, which is slower: %s: %s",
            *(type(error).__name__, error),
        )
        return None
    finally:
        hot.store.let_go()
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
