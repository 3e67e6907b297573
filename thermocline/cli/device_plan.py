"""The device that `thermocline plan` plans for, and what its flags want of it. Opens no device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError
from thermocline.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.config import PlacementConfig
    from thermocline.experts.placement.allocation import DeviceWish
    from thermocline.experts.placement.planner import DeviceMemory, Plan
    from thermocline.experts.placement.wish import DeviceNeeds

# What torch-cpu has without --device-memory: more than any model takes.
_ENDLESS = 1 << 60


def planned_device(placement: PlacementConfig, vram: str | None) -> DeviceMemory:
    """Return the device's memory: as --vram says, or this machine's; --device-memory caps it."""
    from thermocline.experts.placement.planner import DeviceMemory
    from thermocline.kernels.gpu.memory import device_memory

    cap = placement.device_memory_bytes
    if vram is not None:
        total = free = parse_bytes(vram)
    elif "torch-cpu" in (placement.trunk_device, placement.hot_device):
        total = free = _ENDLESS if cap is None else cap
    else:
        total, free = device_memory() or (0, 0)
    return DeviceMemory(total, free if cap is None else min(free, cap))


def plans_device(placement: PlacementConfig, device: DeviceMemory) -> bool:
    """Return whether some of a model is to be on a GPU with this memory, or its stand-in; 0 bytes where there is none."""
    trunk = "cpu" if placement.gpu_layers == 0 else placement.trunk_device
    hot = "none" if placement.cpu_moe else placement.hot_device
    return device.total > 0 and not {trunk, hot}.isdisjoint({"auto", "cuda", "torch-cpu"})


def plan_device(
    asked: PlacementConfig,
    needs: DeviceNeeds,
    device: DeviceMemory,
    heat: Sequence[Sequence[float]] | None,
    *,
    is_auto: bool = True,
) -> Plan:
    """Return the plan. Raises ConfigError for what the engine can not do, DeviceMemoryError for what does not fit.

    is_auto: what no flag decides is chosen; without it only what flags ask for goes to
    the device. heat: as for `make_plan`.
    """
    from thermocline.experts.placement.planner import make_plan
    from thermocline.experts.placement.wish import explicit_placement

    asked = explicit_placement(asked, needs)
    wish = _wish(asked, needs, device, is_auto=is_auto)
    return make_plan(needs.sizes, needs.on_device, device, wish, heat)


def _wish(
    asked: PlacementConfig, needs: DeviceNeeds, device: DeviceMemory, *, is_auto: bool
) -> DeviceWish:
    from thermocline.experts.placement.constraints import parse_experts
    from thermocline.experts.placement.wish import device_wish, most_hot_of

    # Also where no expert is hot.
    parse_experts("--cold", asked.cold, needs.sizes)
    chosen = asked
    if asked.trunk_device == "auto":
        chosen = replace(chosen, trunk_device="cuda" if is_auto and device.usable else "cpu")
    if asked.hot_device == "auto":
        # Experts that are asked for by name are planned as far as they fit.
        has_experts = asked.hot or (is_auto and device.usable and not asked.cpu_moe)
        chosen = replace(chosen, hot_device="cuda" if has_experts else "none")
    kinds = {chosen.trunk_device, chosen.hot_device} - {"cpu", "none"}
    if len(kinds) > 1:
        raise ConfigError(
            f"--trunk-device {chosen.trunk_device} and --hot-device {chosen.hot_device} are two devices: choose one "
            "for both"
        )
    limit = None if device.usable == _ENDLESS else device.usable
    wish = device_wish(asked, chosen, needs, limit)
    if is_auto:
        return wish
    only = replace(wish.constraints, only_hot=True)
    return replace(wish, constraints=only, most_hot=most_hot_of(0.0, needs.sizes, only))
