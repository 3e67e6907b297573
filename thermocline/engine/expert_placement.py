"""Decides which experts are hot, and opens the device that computes them. A part of the assembly.

A GPU that was not asked for may refuse the experts: then all of them stay on the CPU, and a reason says why.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.engine.cpu import make_kernels
from thermocline.engine.devices import without_hot_experts
from thermocline.experts.backends.hot_device import (
    ExpertMemory,
    RoutedExperts,
    build_gpu_device,
    build_simulated_device,
    device_layers,
)
from thermocline.experts.placement.allocation import expert_slots, lent_segments
from thermocline.experts.placement.hot_selection import select_experts
from thermocline.experts.placement.initial import InitialPlacement
from thermocline.experts.placement.slots import LayoutSlots
from thermocline.experts.placement.wish import placement_constraints
from thermocline.kernels.cpu_topology import checked_threads
from thermocline.messages import LayerIndex
from thermocline.prefetch.memory import page_cache_room_bytes
from thermocline.prefetch.residency import ResidencyProbe
from thermocline.remote.assignment import assign_experts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.engine.build_context import BuildContext
    from thermocline.engine.devices import Devices
    from thermocline.experts.backends.hot_device import HotDevice
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.experts.placement.placement import Placement
    from thermocline.remote.assignment import Assignment


# Of the memory that files may have: what is locked can not be given to anybody else.
_LOCKABLE_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class PlacedExperts:
    """devices: after fallbacks. hot_mask: bool [layers, experts]. assignment: the workers' experts. memory: of a GPU."""

    devices: Devices
    initial: InitialPlacement
    hot_mask: NDArray[np.bool_]
    assignment: Assignment
    routed: RoutedExperts
    memory: ExpertMemory | None = None
    hot_device: HotDevice | None = None


def place_experts(context: BuildContext, catalog: ExpertCatalog) -> PlacedExperts:
    """Return which experts are where, with the hot device open.

    Raises ConfigError, and what `build_gpu_device` raises if that GPU was asked for.
    """
    placed = _plan(context, catalog, context.devices)
    try:
        placed = replace(placed, hot_device=_open_hot_device(context, placed))
    except Exception as error:
        if context.config.placement.hot_device != "auto":
            raise
        placed = _plan(context, catalog, without_hot_experts(context.devices, error))
    saver = placed.initial.heat_saver()
    if saver is not None:
        context.kept.enter_context(saver)
    return placed


def _plan(context: BuildContext, catalog: ExpertCatalog, devices: Devices) -> PlacedExperts:
    config, spec, wanted = context.config, context.model.spec, devices.placement
    initial = InitialPlacement(
        context.file, spec, replace(config, placement=wanted), _room_bytes(devices)
    )
    placement = initial.placement
    hot_mask = np.array([placement.hot_mask(LayerIndex(n)) for n in range(spec.num_layers)])
    workers = config.remote.workers
    assignment = assign_experts(hot_mask, len(workers), config.remote.held_share, spec.dense_layers)
    warmth = None
    if initial.known is not None and wanted.hot_choice != "even":
        warmth = initial.known.warmth
    routed = RoutedExperts(
        catalog,
        placement,
        spec.router.num_experts_used,
        context.kernels,
        checked_threads(config.cpu.threads),
        assignment.mask if workers else None,
        initial.kept_away,
        warmth,
        partial(_select, devices, catalog, warmth),
    )
    placed = PlacedExperts(devices, initial, hot_mask, assignment, routed)
    return _with_slots(placed) if wanted.is_gpu_hot else placed


def _select(
    devices: Devices,
    catalog: ExpertCatalog,
    warmth: NDArray[np.float64] | None,
    room: Mapping[str, int],
) -> Placement:
    """Return the experts that a GPU holds at first, as `thermocline plan` selects them. room: experts by the catalog's layouts."""
    wanted, sizes = devices.placement, devices.needs.sizes
    layers = device_layers(catalog)
    slots = {sizes.layers[n].layout: room[catalog.layout(n)] for n in layers}
    nbytes = {catalog.layout(n): catalog.expert_bytes(n) for n in layers}
    budget = sum(count * nbytes[layout] for layout, count in room.items())
    heat = None if warmth is None else warmth.tolist()
    constraints = placement_constraints(wanted, sizes)
    return select_experts(sizes, budget, constraints, heat, slots=slots).placement


def _room_bytes(devices: Devices) -> int | None:
    """Return how many bytes of hot experts there is room for, None for all."""
    wanted = devices.placement
    if wanted.is_gpu_hot:
        assert devices.allocation is not None, "a GPU that is hot has a part for experts"
        return devices.allocation.expert_bytes
    return wanted.simulated_memory_bytes if wanted.hot_device == "simulated" else None


def _with_slots(placed: PlacedExperts) -> PlacedExperts:
    """Return the experts with slots as allocated, by the catalog's names of layouts."""
    devices, catalog = placed.devices, placed.routed.catalog
    allocation, sizes = devices.allocation, devices.needs.on_device
    assert allocation is not None, "a GPU that is hot has a part for experts"
    first = Counter[str]()
    for layer, hot in enumerate(placed.routed.placement.hot):
        first[sizes.layouts[layer]] += len(hot)
    wanted = devices.placement
    constraints = placement_constraints(wanted, devices.needs.sizes)
    is_static = wanted.expert_cache == "static"
    found = expert_slots(sizes, allocation, constraints, first, only_first=is_static)
    lent = lent_segments(sizes, allocation, constraints, found)
    counts, nbytes = Counter[str](), {}
    names = {sizes.layouts[n]: catalog.layout(n) for n in device_layers(catalog)}
    for layout, name in names.items():
        counts[name] += found[layout].count
        nbytes[name] = found[layout].expert_bytes
    slots = {name: LayoutSlots(nbytes[name], counts[name]) for name in nbytes}
    lockable = int(_LOCKABLE_SHARE * page_cache_room_bytes())
    named = lent and lent.renamed(names)
    memory = ExpertMemory(
        slots,
        allocation.num_staged,
        lockable,
        lent=named,
        cache_start=allocation.arena_start,
    )
    slot_bytes = sum(of.count * of.expert_bytes for of in slots.values())
    allocation = replace(allocation, lent=lent, slot_bytes=slot_bytes)
    devices = replace(devices, allocation=allocation)
    return replace(placed, devices=devices, memory=memory)


def _open_hot_device(context: BuildContext, placed: PlacedExperts) -> HotDevice | None:
    wanted, gpu = placed.devices.placement, placed.devices.gpu
    with ExitStack() as opened:
        if wanted.is_gpu_hot:
            assert gpu is not None, "a GPU that is hot is open"
            assert placed.memory is not None, "a GPU that is hot has slots"
            memory = replace(placed.memory, is_in_memory=_is_in_memory(context, placed))
            device = build_gpu_device(wanted, placed.routed, gpu, memory, context.recorder, opened)
        elif wanted.hot_device == "simulated" and wanted.expert_cache != "off":
            # The CPU's kernels on a thread of the device's own: its results are those of cold experts.
            kernels = make_kernels(context.config, threads=1)
            device = build_simulated_device(
                wanted, placed.routed, kernels, context.recorder, opened
            )
        else:
            return None
        context.owned.push(opened.pop_all())
        return device


def _is_in_memory(context: BuildContext, placed: PlacedExperts) -> bool:
    """Return whether the experts' pages are in memory, as far as the system says."""
    try:
        return ResidencyProbe(context.file, placed.routed.catalog).is_resident()
    except OSError:
        return False
