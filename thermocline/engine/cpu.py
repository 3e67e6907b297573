"""Makes the CPU's kernels and its compute lane, counts its threads, and measures its limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.control_groups import processor_limit
from thermocline.engine.devices import uses_gpu
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.cpu_topology import default_threads
from thermocline.kernels.instruction_sets import checked_instruction_set, has_tiles
from thermocline.kernels.native import load_native
from thermocline.kernels.reference import ReferenceKernels
from thermocline.traces.lanes import Lane
from thermocline.workers.lane import LaneThread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.config import EngineConfig
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.machine_limits import MachineLimits
    from thermocline.kernels.weight import ByteArray
    from thermocline.kernels.whole_layer import LayerParts
    from thermocline.traces.recorder import Recorder

# More than a last-level cache holds, and read within a second.
_LIMIT_SAMPLE_BYTES = 1 << 30


def with_threads(config: EngineConfig) -> EngineConfig:
    """Return the config with a number of threads: the default depends on whether a GPU is used. Raises ConfigError."""
    if config.cpu.threads is not None:
        return config
    return replace(config, cpu=replace(config.cpu, threads=_chosen_threads(config)[0]))


def why_threads(config: EngineConfig) -> str:
    """Return why so many threads compute. config: as the user gave it."""
    return "asked for (--threads)" if config.cpu.threads is not None else _chosen_threads(config)[1]


def _chosen_threads(config: EngineConfig) -> tuple[int, str]:
    if uses_gpu(config):
        why = "one per physical core but for one, which waits for the GPU"
        return default_threads(beside_gpu=True), why
    threads, limit = default_threads(beside_gpu=False), processor_limit()
    if limit is not None and threads == math.ceil(limit):
        return threads, f"the control group allows {limit:g} processors' time"
    return threads, "one per processor that may be used"


def multiplies_on_tiles(config: EngineConfig) -> bool:
    """Return whether the CPU's kernels take prompts to matrix tiles. Raises ConfigError or NativeModuleError."""
    if config.kernels == "reference":
        return False
    return has_tiles(checked_instruction_set(load_native(), config.cpu.isa))


def make_kernels(config: EngineConfig, threads: int | None = None) -> Kernels:
    """Return the CPU's kernels; threads: instead of the config's. Raises ConfigError or NativeModuleError."""
    if config.kernels == "reference":
        return ReferenceKernels()
    cpu = config.cpu
    return NativeKernels(cpu.isa, threads or cpu.threads, pin=cpu.pin)


def cpu_lane(config: EngineConfig, kernels: Kernels, recorder: Recorder) -> LaneThread:
    """Return the lane on which the CPU computes; the caller closes it."""
    slowdown, timeline = config.scheduler.decode_slowdown, kernels.timeline()
    return LaneThread(Lane.CPU, recorder, timeline=timeline, slowdown=slowdown)


def measure_limits(kernels: Kernels, layers: Iterable[LayerParts]) -> MachineLimits | None:
    """Measure with a sample of the layers' experts, or of their dense feed-forward; None with the reference kernels."""
    if not isinstance(kernels, NativeKernels):
        return None
    sample: list[ByteArray] = []
    nbytes = 0
    for layer in layers:
        given = layer.routed or layer.shared
        if given is not None and nbytes < _LIMIT_SAMPLE_BYTES:
            raw = tuple(part.raw for part in given.stack.matrices)
            sample.extend(raw)
            nbytes += sum(part.nbytes for part in raw)
    return kernels.measure_limits(sample)
