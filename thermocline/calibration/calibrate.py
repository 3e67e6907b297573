"""Measures what this machine reaches with one model file, once: some seconds, then kept in the cache directory.

Brings the measurements of kernels, disk and the engine's own steps together. Blocks: never on an event loop.
Knows what to measure and in which order, not what follows from it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import statistics
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.calibration.disk_speed import measure_disk
from thermocline.calibration.kernel_speeds import measure_kernels, timed_layers
from thermocline.calibration.speed_cache import cached_speeds, keep_speeds
from thermocline.config import CpuConfig, EngineConfig, MemoryConfig, SchedulerConfig
from thermocline.costmodel.cost_model import Phase, Workload, estimate
from thermocline.costmodel.machine_speeds import MachineSpeeds
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.experts.catalog import ByteSpan, ExpertCatalog
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.cpu_topology import checked_threads
from thermocline.kernels.gpu.requirements import why_no_gpu
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.sizes import measure_sizes
from thermocline.prefetch.advice import PageAdvisor
from thermocline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from thermocline.costmodel.machine_speeds import DeviceSpeeds
    from thermocline.engine.api import Engine
    from thermocline.kernels.weight import ByteArray
    from thermocline.messages import LayerIndex
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.models.sizes import ModelSizes

_LOG: Final = logging.getLogger("thermocline.calibration.calibrate")

_ROUNDS: Final = 5
# The built-in model's steps, of which what its kernels do not take is the engine's own.
_STEP_ROUNDS: Final = 3
_STEP_TOKENS: Final = 48
_STEP_PROMPT: Final = (1, 2, 3, 4, 5, 6, 7, 8)
_STEP_CONTEXT: Final = 128
_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_HEAD: Final = ("output", "token_embd")


def machine_speeds(
    path: str, cpu: CpuConfig, kv_type: str = "f16", *, again: bool = False
) -> MachineSpeeds:
    """Return what was measured of this file on this machine before, or measure it now and keep it.

    again: measure in any case. Raises ModelError, ConfigError, NativeModuleError.
    """
    with open_model_file(path) as file:
        paths = file.paths
    known = None if again else known_speeds(paths, cpu, kv_type)
    if known is None:
        known = calibrate(path, cpu, kv_type)
        keep_speeds(paths, _settings(cpu, kv_type), known)
    return known


def known_speeds(
    paths: Sequence[Path], cpu: CpuConfig, kv_type: str = "f16"
) -> MachineSpeeds | None:
    """Return what was measured before of a model with these files, None where nothing was."""
    return cached_speeds(paths, _settings(cpu, kv_type))


def calibrate(
    path: str, cpu: CpuConfig, kv_type: str = "f16", *, rounds: int = _ROUNDS
) -> MachineSpeeds:
    """Measure, whatever is known. Raises as `machine_speeds`."""
    step_s = _measure_step(cpu)
    with _opened(path, cpu, kv_type) as opened:
        return opened.measure(rounds, step_s)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model file with what is needed to time its parts."""

    file: ModelFile
    kernels: NativeKernels
    model: Model
    sizes: ModelSizes
    cache_type: CacheType
    threads: int

    def measure(self, rounds: int, step_s: float, *, with_disk: bool = True) -> MachineSpeeds:
        """Time the kernels, then a GPU if there is one, then the disk, which releases pages."""
        timed = self._touch(timed_layers(self.sizes))
        limits = self.kernels.measure_limits(timed)
        found = measure_kernels(self.model, self.kernels, self.sizes, self.cache_type, rounds)
        disk = device = None
        if with_disk:
            catalog = ExpertCatalog(self.model.expert_layers)
            device = self._measure_gpu(catalog)
            disk = measure_disk(self.file, catalog, self.sizes.num_used)
        return MachineSpeeds(
            threads=self.threads,
            read_bytes_per_s=limits.read_bytes_per_s,
            multiply_adds_per_s=limits.multiply_adds_per_s,
            experts=found.experts,
            trunk=found.trunk,
            head=found.head,
            attention=found.attention,
            step_s=step_s,
            disk=disk,
            device=device,
        )

    def _measure_gpu(self, catalog: ExpertCatalog) -> DeviceSpeeds | None:
        """Return None without a GPU, or after a logged failure."""
        if why_no_gpu() is not None:
            return None
        from thermocline.calibration.gpu_speeds import measure_gpu

        try:
            return measure_gpu("cuda", catalog, self.kernels, self.threads)
        except Exception as error:  # noqa: BLE001 - whatever a driver says: the rest is measured all the same
            _LOG.warning("the GPU was not measured: %s", error)
            return None

    def _touch(self, layers: tuple[LayerIndex, ...]) -> list[ByteArray]:
        """Bring what is timed into memory, and into this process's view of it; returns those tensors."""
        advisor = PageAdvisor(self.file)
        timed = [info for info in self.file.tensors.values() if _is_timed(info, layers)]
        for info in timed:
            # Advice: what is refused is read when it is first used.
            with suppress(OSError):
                advisor.fetch(ByteSpan(info.shard, info.offset, info.offset + info.nbytes))
        return [self.file.view(info.name) for info in timed]


def _is_timed(info: TensorInfo, layers: tuple[LayerIndex, ...]) -> bool:
    match = _LAYER.match(info.name)
    return info.name.startswith(_HEAD) if match is None else int(match[1]) in layers


@contextmanager
def _opened(path: str, cpu: CpuConfig, kv_type: str) -> Iterator[_Opened]:
    with open_model_file(path) as file:
        threads = _threads(cpu)
        kernels = NativeKernels(cpu.isa, threads, pin=cpu.pin)
        model = open_model(file, kernels)
        cache_type = CacheType[kv_type.upper()]
        sizes = measure_sizes(file.tensors.values(), model.spec, cache_type)
        yield _Opened(file, kernels, model, sizes, cache_type, threads)


def _measure_step(cpu: CpuConfig) -> float:
    """Return the seconds of a decode step that are not its kernels': those of the built-in model's steps."""
    with _opened(str(DEMO_MODEL_PATH), cpu, "f16") as demo:
        return asyncio.run(_time_steps(demo, cpu))


async def _time_steps(demo: _Opened, cpu: CpuConfig) -> float:
    """Time kernels and steps in turn, so that a passing load affects both."""
    # Here: a plan asks this module for what is known, and needs no engine for it.
    from thermocline.engine.api import Engine

    config = EngineConfig(
        cpu=cpu,
        memory=MemoryConfig(max_context_tokens=_STEP_CONTEXT, max_full_contexts=1),
        scheduler=SchedulerConfig(prefix_cache=False),
    )
    work = Workload(Phase.DECODE, 1, cached_tokens=len(_STEP_PROMPT) + _STEP_TOKENS // 2)
    rest = []
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        for _ in range(_STEP_ROUNDS):
            speeds = await asyncio.to_thread(demo.measure, 1, 0.0, with_disk=False)
            step_s = await _step_seconds(engine)
            rest.append(step_s - estimate(demo.sizes, speeds, None, work).seconds)
    return max(0.0, statistics.median(rest))


async def _step_seconds(engine: Engine) -> float:
    params = SamplingParams(max_tokens=_STEP_TOKENS + 1, ignore_eos=True)
    async with aclosing(engine.generate(_STEP_PROMPT, params)) as events:
        async for event in events:
            if event.timings is not None:
                return event.timings.decode_s / _STEP_TOKENS
    raise AssertionError("the stream ended without its last event")


def _threads(cpu: CpuConfig) -> int:
    """Return how many threads an engine has that uses the GPU if there is one."""
    return checked_threads(cpu.threads, beside_gpu=why_no_gpu() is None)


def _settings(cpu: CpuConfig, kv_type: str) -> str:
    gpu = "a GPU" if why_no_gpu() is None else "no GPU"
    return f"{cpu.isa}, {_threads(cpu)} threads, pinned: {cpu.pin}, {kv_type}, {gpu}"
