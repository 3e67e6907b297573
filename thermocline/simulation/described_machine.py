"""Describes the machine on which routing is replayed, from sizes, a plan and speeds. Pure.

Measured speeds may be replaced: by another memory, or another device. Knows no policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.costmodel.cost_model import (
    ACTIVATION_BYTES,
    EXPERT_LAUNCHES,
    Phase,
    Workload,
    copy_seconds,
    device_seconds,
    expert_seconds_cpu,
    head_seconds_cpu,
    non_expert_seconds_cpu,
    non_expert_seconds_device,
)
from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.costmodel.machine_speeds import DeviceSpeeds, RowCosts
from thermocline.simulation.replay import DescribedMachine

if TYPE_CHECKING:
    from thermocline.costmodel.machine_speeds import MachineSpeeds
    from thermocline.models.device.part import DevicePart
    from thermocline.models.sizes import LayerSizes, ModelSizes

_ROWS: Final = (1, 4, 16, 64, 256, 1024)
# A busy link leaves the CPU some of its memory's speed.
_MAX_SLOWDOWN: Final = 0.95


def other_memory(speeds: MachineSpeeds, read_bytes_per_s: float) -> MachineSpeeds:
    """Return these speeds with another memory: reads scale with it, arithmetic stays."""
    ratio = speeds.read_bytes_per_s / read_bytes_per_s

    def of(costs: RowCosts) -> RowCosts:
        reading = costs.seconds_per_byte[0]
        least = reading * ratio
        seconds = (least + max(0.0, each - reading) for each in costs.seconds_per_byte)
        return RowCosts(costs.rows, tuple(seconds))

    return replace(
        speeds,
        read_bytes_per_s=read_bytes_per_s,
        experts={name: of(costs) for name, costs in speeds.experts.items()},
        trunk={name: of(costs) for name, costs in speeds.trunk.items()},
        head=of(speeds.head),
    )


def other_device(
    read_bytes_per_s: float, multiply_adds_per_s: float, link_bytes_per_s: float, launch_s: float
) -> DeviceSpeeds:
    """Return a device whose link is equally fast in both directions, pinned or not."""
    return DeviceSpeeds(
        name="described",
        read_bytes_per_s=read_bytes_per_s,
        multiply_adds_per_s=multiply_adds_per_s,
        pinned_to_device_bytes_per_s=link_bytes_per_s,
        pageable_to_device_bytes_per_s=link_bytes_per_s,
        pinned_to_host_bytes_per_s=link_bytes_per_s,
        pageable_to_host_bytes_per_s=link_bytes_per_s,
        launch_s=launch_s,
    )


def describe(
    sizes: ModelSizes,
    speeds: MachineSpeeds,
    part: DevicePart,
) -> DescribedMachine:
    """Return the machine. part: the non-expert weights that are on the device.

    Raises ConfigError where the speeds lack a device, or a layout of the model.
    """
    device = speeds.device
    assert device is not None, "a machine to replay on has a device"
    layers = tuple(
        _expert_costs(sizes, layer, speeds, device, is_non_expert_there=index in part.layers)
        if layer.expert
        else None
        for index, layer in enumerate(sizes.layers)
    )

    def layer_seconds(num_tokens: int, num_cached: int) -> float:
        phase = Phase.DECODE if num_tokens == 1 else Phase.PREFILL
        work = Workload(phase, num_tokens, num_cached)
        seconds = speeds.step_s + head_seconds_cpu(speeds, sizes)
        if part.has_head:
            seconds = speeds.step_s + device_seconds(device, sizes.output, 1)
        for index, layer in enumerate(sizes.layers):
            if index in part.layers:
                seconds += non_expert_seconds_device(device, layer, work)
            else:
                seconds += non_expert_seconds_cpu(speeds, layer, work)
        return seconds / len(sizes.layers)

    return DescribedMachine(layers, layer_seconds)


def _expert_costs(
    sizes: ModelSizes,
    layer: LayerSizes,
    speeds: MachineSpeeds,
    device: DeviceSpeeds,
    *,
    is_non_expert_there: bool,
) -> ExpertCosts:
    """Rows cross the link, both ways, to the side without the layer's non-expert weights."""
    nbytes = layer.expert
    row_bytes = ACTIVATION_BYTES * sizes.hidden_size
    crossing = copy_seconds(device, row_bytes) + row_bytes / device.pinned_to_host_bytes_per_s
    cpu = [expert_seconds_cpu(speeds, layer.layout, nbytes, rows) for rows in _ROWS]
    there = [device_seconds(device, nbytes, rows) for rows in _ROWS]
    crossed = cpu if is_non_expert_there else there
    for index, rows in enumerate(_ROWS):
        crossed[index] += rows * crossing
    link = device.pinned_to_device_bytes_per_s
    reading = nbytes / cpu[0]
    lost = max(0.0, reading + link - max(speeds.read_bytes_per_s, reading)) / reading
    return ExpertCosts(
        nbytes,
        layer.layout,
        _ROWS,
        tuple(cpu),
        tuple(there),
        copy_seconds(device, nbytes) + device.launch_s,
        launch_overhead_s=EXPERT_LAUNCHES * device.launch_s,
        copy_slowdown=min(lost, _MAX_SLOWDOWN),
    )
