"""Compiles and captures on an engine's device before the first request, while its lanes are idle.

A part of the assembly. Knows no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.engine.whole_device import whole_model_experts

if TYPE_CHECKING:
    from thermocline.engine.build_context import BuildContext
    from thermocline.experts.backends.hot_device import HotDevice


def warm_up_devices(context: BuildContext, hot: HotDevice | None) -> tuple[str, ...]:
    """Do so where a device can capture, and return what was done; on others nothing is. Raises DeviceFaultError."""
    gpu, non_expert = context.devices.gpu, context.devices.non_expert
    if gpu is None or not gpu.streams.can_capture:
        return ()
    from thermocline.experts.backends.gpu import GpuDevice
    from thermocline.experts.backends.gpu_warm_up import compile_experts
    from thermocline.models.device.warm_up import warm_up

    done = []
    if hot is not None and isinstance(hot.device, GpuDevice):
        num_chosen = context.model.spec.router.num_experts_used
        done.append(compile_experts(hot.device, num_chosen))
    if non_expert is not None:
        there = whole_model_experts(context, hot)
        held = None if there is None or not there.is_full else there.held
        drafts = context.config.speculation.drafters != "off"
        max_requests = context.config.scheduler.max_requests
        done.append(warm_up(non_expert, max_requests, held, drafts=drafts))
    return tuple(done)
