"""Decides which devices an engine has, and opens them. A part of the assembly; loads torch only for a GPU.

With "auto" the GPU is tried. If it is missing, too small, broken, or computes other results than the CPU, the CPU is
used instead; the reason is logged and shown.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.experts.backends.hot_device import OpenGpu
from thermocline.experts.placement.allocation import allocate
from thermocline.experts.placement.wish import device_wish, explicit_placement
from thermocline.kernels.gpu.requirements import NO_DRIVER, require_packages, why_no_gpu
from thermocline.messages import LayerIndex
from thermocline.traces.lanes import Lane
from thermocline.workers.lane import LaneThread

if TYPE_CHECKING:
    import torch

    from thermocline.config import EngineConfig, PlacementConfig
    from thermocline.experts.placement.allocation import DeviceAllocation
    from thermocline.experts.placement.wish import DeviceNeeds
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.models.contract import Model
    from thermocline.models.device.non_expert import DeviceNonExpert
    from thermocline.traces.recorder import Recorder

_LOG: Final = logging.getLogger("thermocline.devices")


@dataclass(frozen=True, slots=True)
class Devices:
    """placement: without "auto". non_expert: what of it is there; None where all is on the CPU. gpu: the lane; None without a part of the model there.

    cache: what there is, on the device or for the CPU. allocation: None without a device. reasons: why not more of
    the model is on a GPU.
    """

    placement: PlacementConfig
    non_expert: DeviceNonExpert | None
    gpu: OpenGpu | None
    needs: DeviceNeeds
    cache: KVCacheSpec
    allocation: DeviceAllocation | None
    reasons: tuple[str, ...]

    @property
    def device_layers(self) -> frozenset[LayerIndex]:
        """Layers whose non-expert weights and cache are on the device."""
        part = () if self.non_expert is None else self.non_expert.part.layers
        return frozenset(map(LayerIndex, part))


def uses_gpu(config: EngineConfig) -> bool:
    """Return whether an engine will try to compute on a GPU. Raises ConfigError."""
    placement, _ = _resolve_auto(config, config.placement)
    is_hot = placement.is_gpu_hot and placement.hot_device == "cuda"
    return is_hot or (placement.trunk_device == "cuda" and placement.gpu_layers != 0)


def uses_device(config: EngineConfig) -> bool:
    """Return whether an engine will try to compute on a GPU, or on what stands in for one. Raises ConfigError."""
    stand_in = "torch-cpu" in (config.placement.trunk_device, config.placement.hot_device)
    return stand_in or uses_gpu(config)


def open_devices(
    config: EngineConfig,
    needs: DeviceNeeds,
    model: Model,
    kernels: Kernels,
    recorder: Recorder,
    owned: ExitStack,
) -> Devices:
    """Open the devices; `owned` closes them.

    Raises ConfigError, DeviceMissingError, DeviceMemoryError and DeviceFaultError for what was asked for.
    """
    asked = explicit_placement(config.placement, needs)
    placement, reasons = _resolve_auto(config, asked)
    kind = _device_of(placement)
    on_cpu = Devices(placement, None, None, needs, needs.cache, None, reasons)
    if kind is None:
        return on_cpu
    try:
        with ExitStack() as opened:
            streams = _streams(kind, placement, opened)
            allocation = _allocate(asked, placement, needs, streams)
            owned.push(opened.pop_all())
    except Exception as error:
        is_hot_asked = asked.is_gpu_hot and asked.hot_device != "auto"
        if is_hot_asked or asked.trunk_device not in ("auto", "cpu"):
            raise
        reason = _refuse("non-expert weights and hot experts", error)
        placement = replace(placement, trunk_device="cpu", hot_device="none")
        return replace(on_cpu, placement=placement, reasons=(*reasons, reason))
    non_expert = arena = None
    if allocation.has_non_expert:
        is_asked = asked.trunk_device != "auto"
        try:
            arena = _open_arena(streams, allocation, needs)
            non_expert = _open_non_expert(
                model, kernels, streams, allocation, arena, is_asked=is_asked
            )
        except Exception as error:
            if is_asked:
                raise
            arena = None
            reasons += (_refuse("non-expert weights", error),)
            allocation = _allocate(asked, replace(placement, trunk_device="cpu"), needs, streams)
    placement = _what_is_there(placement, allocation)
    gpu = None
    if _device_of(placement) is not None:
        lane = owned.enter_context(_gpu_lane(config, recorder))
        is_whole = non_expert is not None and non_expert.part.is_whole
        gpu = OpenGpu(streams, lane, arena, is_whole=is_whole)
    reasons += allocation.refused
    return Devices(placement, non_expert, gpu, needs, allocation.cache, allocation, reasons)


def without_hot_experts(devices: Devices, error: Exception) -> Devices:
    """Return the devices with all experts on the CPU, and a reason for it in the log."""
    reason = _refuse("hot experts", error)
    allocation = devices.allocation
    if allocation is not None:
        allocation = replace(
            allocation, expert_bytes=0, staging_bytes=0, num_staged=0, slot_bytes=0, lent=None
        )
    return replace(
        devices,
        placement=replace(devices.placement, hot_device="none"),
        allocation=allocation,
        reasons=(*devices.reasons, reason),
    )


def _resolve_auto(
    config: EngineConfig, placement: PlacementConfig
) -> tuple[PlacementConfig, tuple[str, ...]]:
    """Return the placement with a device in place of each "auto"."""
    missing = None
    if "auto" in (placement.hot_device, placement.trunk_device):
        missing = why_no_gpu()
        if missing is None and config.kernels == "reference":
            missing = "reference kernels were asked for"
    if placement.trunk_device == "auto":
        placement = replace(placement, trunk_device="cuda" if missing is None else "cpu")
    if placement.hot_device == "auto":
        is_gpu = missing is None and not placement.cpu_moe
        if placement.hot and not is_gpu:
            why = missing or "--cpu-moe keeps experts on the CPU"
            raise ConfigError(
                f"--hot needs a device for hot experts (so does --override-tensor with CUDA0), and {why}: give another "
                "--hot-device"
            )
        placement = replace(placement, hot_device="cuda" if is_gpu else "none")
    is_expected = missing == NO_DRIVER and not placement.cpu_moe
    return placement, () if missing is None or is_expected else (f"no GPU is used: {missing}",)


def _what_is_there(placement: PlacementConfig, allocation: DeviceAllocation) -> PlacementConfig:
    """Return the placement without the parts that the device has no room for."""
    if not allocation.has_non_expert:
        placement = replace(placement, trunk_device="cpu")
    if placement.is_gpu_hot and not allocation.has_experts:
        placement = replace(placement, hot_device="none")
    return placement


def _device_of(placement: PlacementConfig) -> str | None:
    """Return the device that a part of the model is to be on, None for no device. Raises ConfigError for two."""
    hot = placement.hot_device if placement.is_gpu_hot else None
    trunk = placement.trunk_device if placement.trunk_device != "cpu" else None
    if hot is not None and trunk is not None and hot != trunk:
        raise ConfigError(
            f"--trunk-device {trunk} and --hot-device {hot} are two devices: choose one for both"
        )
    return trunk or hot


def _allocate(
    asked: PlacementConfig,
    placement: PlacementConfig,
    needs: DeviceNeeds,
    streams: DeviceStreams,
) -> DeviceAllocation:
    wish = device_wish(asked, placement, needs, streams.free_bytes())
    allocation = allocate(needs.on_device, wish)
    for reason in allocation.refused:
        _LOG.warning("%s", reason)
    return allocation


def _open_arena(
    streams: DeviceStreams, allocation: DeviceAllocation, needs: DeviceNeeds
) -> torch.Tensor | None:
    """Return the memory in which experts and the cache take turns; None where each has its own."""
    if not allocation.max_lent_bytes:
        return None
    import torch

    with streams.computing():
        nbytes = allocation.arena_bytes(needs.on_device)
        return torch.empty(nbytes, dtype=torch.uint8, device=streams.device)


def _open_non_expert(
    model: Model,
    kernels: Kernels,
    streams: DeviceStreams,
    allocation: DeviceAllocation,
    arena: torch.Tensor | None,
    *,
    is_asked: bool,
) -> DeviceNonExpert:
    from thermocline.models.device.check import check_non_expert
    from thermocline.models.device.non_expert import DeviceNonExpert

    memory = None if arena is None else arena[allocation.arena_start :]
    non_expert = DeviceNonExpert(
        model, kernels, streams, allocation.cache, allocation.part, memory=memory
    )
    # A stand-in that was asked for is what tests ask for.
    if not is_asked or streams.device.type == "cuda":
        check_non_expert(non_expert, model)
    return non_expert


def _streams(kind: str, placement: PlacementConfig, opened: ExitStack) -> DeviceStreams:
    require_packages()
    from thermocline.kernels.gpu.streams import DeviceStreams

    streams = opened.enter_context(DeviceStreams.open(kind))
    if placement.device_memory_bytes is not None:
        streams.limit(placement.device_memory_bytes)
    return streams


def _gpu_lane(config: EngineConfig, recorder: Recorder) -> LaneThread:
    return LaneThread(Lane.GPU_COMPUTE, recorder, slowdown=config.scheduler.decode_slowdown)


def _refuse(what: str, error: Exception) -> str:
    reason = f"{what} on the CPU: the GPU can not be used ({type(error).__name__}: {error})"
    _LOG.warning("%s", reason)
    return reason
