"""What computes the experts of a device that has all else, for steps through all layers.

A part of the assembly. Loads torch only where such a device is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.experts.backends.full_device import NoExperts

if TYPE_CHECKING:
    from thermocline.engine.build_context import BuildContext
    from thermocline.experts.backends.full_device import FullDevice
    from thermocline.experts.backends.hot_device import HotDevice
    from thermocline.experts.backends.streamed_device import StreamedDevice
    from thermocline.kernels.gpu.resident import ResidentExperts
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.models.spec import ModelSpec


def whole_model_experts(
    context: BuildContext, hot: HotDevice | None
) -> FullDevice | NoExperts | None:
    """Return the experts of steps that a device computes alone: where it may hold all of them, or the model has none."""
    non_expert, gpu = context.devices.non_expert, context.devices.gpu
    if non_expert is None or gpu is None or not non_expert.part.is_whole:
        return None
    if context.model.spec.has_experts:
        return None if hot is None else hot.full
    return NoExperts(no_resident_experts(gpu.streams, context.model.spec))


def streamed_experts(context: BuildContext, hot: HotDevice | None) -> StreamedDevice | None:
    """Return the experts of prompts that a device computes alone though it lacks some; None where it never does."""
    non_expert = context.devices.non_expert
    if hot is None or non_expert is None or not non_expert.part.is_whole:
        return None
    return hot.streamed


def no_resident_experts(streams: DeviceStreams, spec: ModelSpec) -> ResidentExperts:
    """Return a device's side of steps none of whose experts it has."""
    from thermocline.kernels.gpu.resident import ResidentExperts

    return ResidentExperts(streams, {}, spec.num_layers, spec.router.num_experts, {})
