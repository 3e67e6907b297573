"""Plans what lies on the device and what on the CPU before anything is loaded, with the reasons. Pure.

`allocation.py` divides the device's memory; here its room for experts is filled by use per byte.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.experts.placement.allocation import allocate, expert_slots, lent_segments
from thermocline.experts.placement.hot_selection import select_experts, select_share
from thermocline.models.device.part import DevicePart
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thermocline.experts.placement.allocation import DeviceAllocation, DeviceWish
    from thermocline.experts.placement.placement import Placement
    from thermocline.models.device.sizes import DeviceSizes
    from thermocline.models.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory as reported, in bytes. Drivers of unified memory may report more free than total."""

    total: int
    free: int

    @property
    def usable(self) -> int:
        """The bytes that a plan may use."""
        return max(0, min(self.total, self.free))


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything goes. Sizes in bytes; the names are those of `plan --json`.

    device_layers: whose non-expert weights and cache are on the device; trunk_layers_on_gpu: how many they are.
    trunk_bytes: what non-expert weights take on the device, as non_expert_bytes. kv_bytes: of the device's cache, states
    included. safety_bytes: left free, as workspace_bytes. expert_budget_bytes: of the slots for experts that stay, as
    expert_bytes_kv_full: what they have while the cache is full. expert_bytes_kv_empty: with its memory while it is empty.
    slots: experts of each layout on the device. hot_share: the share of recorded choices that fell on them; None
    without a record. reasons: what was decided and why, in order.
    """

    trunk_layers_on_gpu: int
    trunk_layers: int
    device_layers: tuple[int, ...]
    head_on_device: bool
    trunk_bytes: int
    non_expert_bytes: int
    kv_bytes: int
    kv_contexts: int
    staging_bytes: int
    workspace_bytes: int
    safety_bytes: int
    expert_budget_bytes: int
    expert_bytes_kv_full: int
    expert_bytes_kv_empty: int
    hot_expert_bytes: int
    routed_expert_bytes: int
    host_bytes: int
    host_kv_bytes: int
    device_bytes_total: int
    device_bytes_limit: int
    placement: Placement
    slots: Mapping[str, int]
    hot_share: float | None
    reasons: tuple[str, ...]

    @property
    def part(self) -> DevicePart:
        """The non-expert weights that are on the device."""
        return DevicePart(self.trunk_layers, self.device_layers, self.head_on_device)

    @property
    def device_bytes(self) -> int:
        """The bytes used on the device; `workspace_bytes` stay free besides."""
        return self.trunk_bytes + self.kv_bytes + self.staging_bytes + self.hot_expert_bytes


def make_plan(
    sizes: ModelSizes,
    on_device: DeviceSizes,
    device: DeviceMemory,
    wish: DeviceWish,
    heat: Sequence[Sequence[float]] | None = None,
) -> Plan:
    """Return the plan for a device and what is wanted of it.

    heat: how often each expert was chosen, [layers][experts]; None counts all the same. On a device without memory
    everything stays on the CPU. Raises what `allocate` raises.
    """
    allocation = allocate(on_device, wish)
    constraints = wish.constraints
    asked = select_share(sizes, 0.0, allocation.expert_bytes, constraints, heat).placement
    slots = expert_slots(
        on_device, allocation, constraints, _slots(sizes, asked), only_first=constraints.only_hot
    )
    counts = {layout: of.count for layout, of in slots.items()}
    budget = sum(of.count * of.expert_bytes for of in slots.values())
    lent = lent_segments(on_device, allocation, constraints, slots)
    experts = select_experts(sizes, budget, constraints, heat, slots=counts)
    tokens = wish.cache.min_blocks * wish.cache.block_tokens
    part, num_layers = allocation.part, len(sizes.layers)
    host_kv = sizes.kv(tokens) - sum(sizes.layers[n].kv(tokens) for n in part.layers)
    return Plan(
        trunk_layers_on_gpu=len(part.layers),
        trunk_layers=num_layers,
        device_layers=part.layers,
        head_on_device=part.has_head,
        trunk_bytes=allocation.non_expert_bytes,
        non_expert_bytes=allocation.non_expert_bytes,
        kv_bytes=allocation.kv_bytes,
        kv_contexts=allocation.num_contexts,
        staging_bytes=allocation.staging_bytes,
        workspace_bytes=allocation.workspace_bytes,
        safety_bytes=allocation.workspace_bytes,
        expert_budget_bytes=budget,
        expert_bytes_kv_full=budget,
        expert_bytes_kv_empty=budget + (0 if lent is None else lent.expert_bytes),
        hot_expert_bytes=experts.nbytes,
        routed_expert_bytes=sizes.routed,
        host_bytes=sizes.total - sizes.non_expert_of(part) - experts.nbytes + host_kv,
        host_kv_bytes=host_kv,
        device_bytes_total=device.total,
        device_bytes_limit=device.usable,
        placement=experts.placement,
        slots={
            layout: count for layout, count in _slots(sizes, experts.placement).items() if count
        },
        hot_share=experts.hot_share,
        reasons=(
            *_about(sizes, device, allocation),
            *experts.reasons,
            *_about_slots(sizes, experts.placement),
            *(() if lent is None else lent.reasons()),
        ),
    )


def _slots(sizes: ModelSizes, placement: Placement) -> Mapping[str, int]:
    slots: Counter[str] = Counter()
    for layer, hot in zip(sizes.layers, placement.hot, strict=True):
        slots[layer.layout] += len(hot)
    return slots


def _about_slots(sizes: ModelSizes, placement: Placement) -> Iterator[str]:
    """Yield how many experts of each size lie on the device, where sizes differ."""
    slots: Counter[tuple[int, str]] = Counter()
    for layer, hot in zip(sizes.layers, placement.hot, strict=True):
        formats = dict.fromkeys(part.rpartition(":")[2] for part in layer.layout.split())
        slots[layer.expert, ", ".join(formats)] += len(hot)
    groups = sorted(item for item in slots.items() if item[1])
    if len(groups) > 1:
        yield "places by size: " + "; ".join(
            f"{number} of {format_bytes(nbytes)} ({formats})"
            for (nbytes, formats), number in groups
        )


def _about(sizes: ModelSizes, device: DeviceMemory, allocation: DeviceAllocation) -> Iterator[str]:
    if device.free > device.total:
        yield (
            f"the device calls {format_bytes(device.free)} free of {format_bytes(device.total)}: counted "
            "as the latter"
        )
    if not device.usable:
        yield "no device memory: the CPU computes everything"
    yield from allocation.reasons
    if allocation.has_non_expert:
        yield (
            f"embedding table on the host: {format_bytes(sizes.embedding)}, of which a token takes one row"
        )
