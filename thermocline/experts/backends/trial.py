"""Measures what experts cost the CPU and a device by computing some of them, at the start. Blocks.

Takes tenths of a second and reads a few experts' bytes. Knows no policy.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.kernels.contract import ExpertWork
from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from thermocline.experts.backends.simulated import ExpertKernels
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import ExpertStack
    from thermocline.workers.lane import LaneThread

TRIAL_ROWS: Final = {1: 8, 4: 4, 16: 2, 64: 1, 256: 1}
"""Rows per expert, and how many experts with so many rows a trial computes at once."""

_REPEATS: Final = 3
_NUM_HOPS: Final = 16
# How long CPU and device are measured computing at once, at least; for how many of the CPU's jobs; how often.
_WINDOW_S: Final = 10e-3
_JOBS_PER_WINDOW: Final = 10
_NUM_WINDOWS: Final = 3
# One of each arithmetic.
_SHARE_ROWS: Final = (1, 16)
# Of the CPU's throughput: a device that adds less is not used.
_LEAST_SHARE: Final = 1e-3
# To the device, its compute, and back.
_HOPS_PER_LAYER: Final = 3
# Python's part of a layer that is split over backends, beyond one in a single job (`make bench-overhead`).
_SPLIT_S: Final = 50e-6
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """What one layer's experts cost a device, in seconds.

    device_s: of one expert, by `TRIAL_ROWS`, with the transfer of activations both ways. The others: see `ExpertCosts`.
    """

    device_s: tuple[float, ...]
    copy_s: float
    launch_overhead_s: float
    copy_slowdown: float = 0.0
    recorded: tuple[float, float] | None = None
    output_row_s: float | None = None
    """None for rows that come back as fast as experts go."""
    bulk_copy_s: float | None = None


class Trial(Protocol):
    """Measures one device."""

    def times(self, layer: LayerIndex) -> TrialTimes:
        """Compute some of the layer's experts, and return what it took."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedTrial:
    """`Trial` of a simulated device, which may share its cores with the CPU's kernels.

    host: the CPU's kernels. kernels, lane: the device's. copy_bytes_per_s: of its link. has_own_core: whether the CPU's
    kernels leave it one. Without it the device takes from them, or from other programs, what it seems to add.
    """

    catalog: ExpertCatalog
    host: Kernels
    kernels: ExpertKernels
    lane: LaneThread
    copy_bytes_per_s: float
    has_own_core: bool = True

    def times(self, layer: LayerIndex) -> TrialTimes:
        """See `Trial.times`. The device computes as the CPU does, at a share of its speed that no number of rows changes."""
        stack = self.catalog.stack(layer)
        # Of a row, both ways.
        link_s = 2 * _FLOAT_BYTES * stack.hidden_size / self.copy_bytes_per_s
        cpu_s = {rows: cpu_seconds(stack, self.host, rows) for rows in TRIAL_ROWS}
        share = _LEAST_SHARE
        if self.has_own_core:
            shares = [self._share(stack, rows) for rows in _SHARE_ROWS for _ in range(_NUM_WINDOWS)]
            share = max(float(np.median(shares)), _LEAST_SHARE)
        return TrialTimes(
            tuple(cpu_s[rows] / share + rows * link_s for rows in TRIAL_ROWS),
            self.catalog.expert_bytes(layer) / self.copy_bytes_per_s,
            launch_overhead_seconds(self.lane),
        )

    def _share(self, stack: ExpertStack, rows: int) -> float:
        """Return what the device adds to the CPU's throughput while both compute, as a share of it.

        On cores of its own that is its own throughput; where both share cores it is far less. The CPU alone is measured
        next to both at once, so that other programs disturb the two alike.
        """
        job, num_experts = _job(stack, self.kernels, rows)
        alone = _rate(stack, self.host, rows)
        ended = threading.Event()
        with ThreadPoolExecutor(1) as other:
            beside = other.submit(_times_of, job, ended)
            here = _rate(stack, self.host, rows)
            end_s = time.perf_counter()
            ended.set()
            times = beside.result()
        # What the device did alone after the CPU's end does not count, unless it was too slow for anything else.
        during = [at_s for at_s in times if at_s <= end_s]
        times = during if len(during) > 1 else times
        there = num_experts * (len(times) - 1) / (times[-1] - times[0])
        return min(there, here + there - alone) / alone


def measure_costs(
    catalog: ExpertCatalog, layers: Collection[LayerIndex], kernels: Kernels, trial: Trial
) -> tuple[ExpertCosts | None, ...]:
    """Return the costs of an expert by layer, None where it is not one of `layers`.

    Layers of one layout have equal costs: the first of them is measured.
    """
    known: dict[str, ExpertCosts] = {}
    costs: list[ExpertCosts | None] = []
    for number in range(catalog.num_layers):
        layer = LayerIndex(number)
        if layer not in layers:
            costs.append(None)
            continue
        layout = catalog.layout(layer)
        if layout not in known:
            known[layout] = _measure(catalog, layer, kernels, trial.times(layer))
        costs.append(known[layout])
    return tuple(costs)


def _measure(
    catalog: ExpertCatalog, layer: LayerIndex, kernels: Kernels, found: TrialTimes
) -> ExpertCosts:
    stack = catalog.stack(layer)
    return ExpertCosts(
        nbytes=catalog.expert_bytes(layer),
        layout=catalog.layout(layer),
        rows=tuple(TRIAL_ROWS),
        cpu_s=tuple(cpu_seconds(stack, kernels, rows) for rows in TRIAL_ROWS),
        device_s=found.device_s,
        copy_s=found.copy_s,
        launch_overhead_s=found.launch_overhead_s,
        copy_slowdown=found.copy_slowdown,
        recorded=found.recorded,
        bulk_copy_s=found.bulk_copy_s,
        output_row_s=found.copy_s * _FLOAT_BYTES * stack.hidden_size / catalog.expert_bytes(layer)
        if found.output_row_s is None
        else found.output_row_s,
    )


def cpu_seconds(stack: ExpertStack, kernels: ExpertKernels, rows: int) -> float:
    """Return the seconds of one expert with so many rows."""
    job, num_experts = _job(stack, kernels, rows)
    return least_seconds(job) / num_experts


def least_seconds(job: Callable[[], object]) -> float:
    """Return the seconds of a job: the minimum of some tries."""
    tries = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        job()
        tries.append(time.perf_counter() - start_s)
    return min(tries)


def _job(stack: ExpertStack, kernels: ExpertKernels, rows: int) -> tuple[Callable[[], object], int]:
    """Return a job that computes experts with so many rows each, and how many experts those are."""
    experts = np.arange(min(TRIAL_ROWS[rows], len(stack)), dtype=np.int32)
    counts = np.full(len(experts), rows, np.int32)
    pairs = np.tile(np.arange(rows, dtype=np.int32), len(experts))
    x = np.ones((rows, stack.hidden_size), np.float32)
    work = ExpertWork(stack, experts, counts, x, pairs, np.ones(len(pairs), np.float32))
    return partial(kernels.expert_outputs, work, prompt=rows > 1), len(experts)


def _rate(stack: ExpertStack, kernels: ExpertKernels, rows: int) -> float:
    """Return how many experts with so many rows are computed per second within a window."""
    job, num_experts = _job(stack, kernels, rows)
    start_s = time.perf_counter()
    count = 0
    while (spent_s := time.perf_counter() - start_s) < _WINDOW_S or count < _JOBS_PER_WINDOW:
        job()
        count += 1
    return count * num_experts / spent_s


def _times_of(job: Callable[[], object], ended: threading.Event) -> list[float]:
    """Run the job until `ended`, once at least; return when it began, and when each run ended, in seconds."""
    times = [time.perf_counter()]
    while len(times) == 1 or not ended.is_set():
        job()
        times.append(time.perf_counter())
    return times


def launch_overhead_seconds(lane: LaneThread) -> float:
    """Return what it costs to split a layer with a lane: hops to it and back, and Python's overhead."""
    tries = []
    for _ in range(_NUM_HOPS):
        start_s = time.perf_counter()
        lane.submit_background(_nothing()).result()
        tries.append(time.perf_counter() - start_s)
    return _SPLIT_S + _HOPS_PER_LAYER * float(np.median(tries))


def _nothing() -> Generator[None, None, None]:
    return
    yield
