"""Measures what experts cost the CPU and a simulated device, by computing some of them. Blocks; for the start.

Tenths of a second, and a few experts' bytes read. Knows no policy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.experts.expert_costs import ExpertCosts
from thermocline.kernels.contract import ExpertWork
from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Generator

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.lane import LaneThread
    from thermocline.kernels.weight import ExpertStack

# Tokens per expert, and how many experts are computed at once with so many.
_ROWS: Final = {1: 8, 4: 4, 16: 2, 64: 1, 256: 1}
_REPEATS: Final = 3
_NUM_HOPS: Final = 16
# To the device, its compute, and back.
_HOPS_PER_VISIT: Final = 3
# An estimate of what a layer in parts costs Python beyond one in a single job.
_PARTS_S: Final = 150e-6
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TrialDevice:
    """Who computes on the device, on which lane, and how fast its link is, in bytes per second."""

    kernels: Kernels
    lane: LaneThread
    copy_bytes_per_s: float


def measure_costs(
    catalog: ExpertCatalog, kernels: Kernels, device: TrialDevice
) -> tuple[ExpertCosts | None, ...]:
    """Return the costs of an expert by layer, None where a layer has none.

    Layers of one layout cost alike: the first of them is measured.
    """
    known: dict[str, ExpertCosts] = {}
    costs: list[ExpertCosts | None] = []
    for number in range(catalog.num_layers):
        layer = LayerIndex(number)
        nbytes = catalog.expert_bytes(layer)
        if not nbytes:
            costs.append(None)
            continue
        layout = _layout(catalog.stack(layer))
        if layout not in known:
            known[layout] = _measure(catalog.stack(layer), nbytes, layout, kernels, device)
        costs.append(known[layout])
    return tuple(costs)


def _measure(
    stack: ExpertStack, nbytes: int, layout: str, kernels: Kernels, device: TrialDevice
) -> ExpertCosts:
    hidden = stack.gate.cols
    link_s = 2 * _FLOAT_BYTES * hidden / device.copy_bytes_per_s  # of a row, there and back
    on_device = [_seconds(stack, device.kernels, rows) + rows * link_s for rows in _ROWS]
    return ExpertCosts(
        nbytes=nbytes,
        layout=layout,
        rows=tuple(_ROWS),
        cpu=tuple(_seconds(stack, kernels, rows) for rows in _ROWS),
        device=tuple(on_device),
        copy=nbytes / device.copy_bytes_per_s,
        visit=_PARTS_S + _HOPS_PER_VISIT * _hop_seconds(device.lane),
    )


def _seconds(stack: ExpertStack, kernels: Kernels, rows: int) -> float:
    """Return what one expert takes with so many tokens: the least of some tries."""
    experts = np.arange(min(_ROWS[rows], len(stack)), dtype=np.int32)
    counts = np.full(len(experts), rows, np.int32)
    pairs = np.tile(np.arange(rows, dtype=np.int32), len(experts))
    x = np.ones((rows, stack.gate.cols), np.float32)
    work = ExpertWork(stack, experts, counts, x, pairs, np.ones(len(pairs), np.float32))
    tries = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        kernels.expert_outputs(work, prompt=rows > 1)
        tries.append(time.perf_counter() - start_s)
    return min(tries) / len(experts)


def _hop_seconds(lane: LaneThread) -> float:
    """Return what it takes to have another thread do nothing: the median of some tries."""
    tries = []
    for _ in range(_NUM_HOPS):
        start_s = time.perf_counter()
        lane.spare(_nothing()).result()
        tries.append(time.perf_counter() - start_s)
    return float(np.median(tries))


def _nothing() -> Generator[None, None, None]:
    return
    yield


def _layout(stack: ExpertStack) -> str:
    parts = (stack.gate, stack.up, stack.down)
    return ",".join(f"{part.format.name} {part.raw.shape[1]}x{part.cols}" for part in parts)
