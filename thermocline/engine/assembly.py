"""Builds an engine's parts from a file and a config, in one visible order, and closes them in reverse.

Each part gets what it needs when it is made. How a part is made is known to the builders beside this file.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from thermocline.engine.build_context import BuildContext
from thermocline.engine.cache_builder import KeptCache, choose_limits, cpu_cache, device_needs_of
from thermocline.engine.cpu import cpu_lane, make_kernels, with_threads
from thermocline.engine.devices import open_devices
from thermocline.engine.drafter_builder import build_speculator, hidden_readers
from thermocline.engine.expert_stages import ExpertBackends, open_expert_backends
from thermocline.engine.mesh_builder import build_loops, for_ranks
from thermocline.engine.stage_builder import build_runner
from thermocline.engine.text_builder import TextParts, open_text
from thermocline.experts.routing_log import RoutingLog
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.models.footprint import decoder_tensors, measure_footprint
from thermocline.models.registry import open_model
from thermocline.traces.recorder import MemoryRecorder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from thermocline.config import EngineConfig
    from thermocline.kernels.contract import Kernels
    from thermocline.models.contract import Model
    from thermocline.models.footprint import Footprint
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.pipeline.execution.runner import Runner
    from thermocline.pipeline.replica_loops import AnyStepLoop
    from thermocline.workers.lane import LaneThread


class LoadStep(StrEnum):
    """What opening a model consists of, in order."""

    FILE = "file"
    WEIGHTS = "weights"
    TOKENIZER = "tokenizer"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that one engine consists of. resources: closes all of it."""

    model: Model
    kept: KeptCache
    kernels: Kernels
    text: TextParts
    experts: ExpertBackends
    recorder: MemoryRecorder
    lanes: tuple[LaneThread, ...]
    runner: Runner
    step_loop: AnyStepLoop
    limits: PromptLimits
    footprint: Footprint
    resources: ExitStack

    def close(self) -> None:
        """Close every resource in reverse order of its making."""
        self.resources.close()


def load_parts(
    path: str | os.PathLike[str],
    config: EngineConfig,
    on_step: Callable[[LoadStep], None] = lambda step: None,
) -> EngineParts:
    """Open the file and build all parts; on any error, what was opened is closed again.

    on_step is told what begins. Raises ModelError, ConfigError or NativeModuleError, and ModelChangedError where the
    file was changed meanwhile.
    """
    with ExitStack() as owned:
        on_step(LoadStep.FILE)
        config = with_threads(for_ranks(config))
        file = owned.enter_context(open_guarded_model(path))
        recorder = MemoryRecorder(config.trace.max_records, enabled=config.trace.enabled)
        kernels = make_kernels(config)
        on_step(LoadStep.WEIGHTS)
        model = open_model(file, kernels, config.memory.max_context_tokens)
        on_step(LoadStep.TOKENIZER)
        text = open_text(config, file, model.spec.vocab_size, owned)
        limits = choose_limits(config, model.spec, file)
        needs = device_needs_of(config, model.spec, limits, file)
        devices = open_devices(config, needs, model, kernels, recorder, owned)
        cache = cpu_cache(devices.cache, model.spec, devices.device_layers)
        on_step(LoadStep.EXPERTS)
        kept = owned.enter_context(ExitStack())
        cpu = owned.enter_context(cpu_lane(config, kernels, recorder))
        context = BuildContext(
            config, devices, file, model, kernels, recorder, limits, cache, owned, kept
        )
        experts = open_expert_backends(context, cpu)
        routing_log = RoutingLog()
        speculator = build_speculator(context)
        readers = hidden_readers(speculator)
        runner = build_runner(context, experts, cache, cpu, routing_log, readers)
        step_loop = build_loops(context, experts, runner, cpu, routing_log, speculator, cache)
        if (change := file.find_change()) is not None:
            raise change
        gpu_lanes = () if devices.gpu is None else (devices.gpu.lane,)
        hot_lanes = () if experts.hot_device is None else experts.hot_device.lanes
        tensors = decoder_tensors(file.tensors.values(), model.spec.num_layers)
        return EngineParts(
            model,
            KeptCache(file, cache),
            kernels,
            text,
            experts,
            recorder,
            (cpu, *gpu_lanes, *hot_lanes),
            runner,
            step_loop,
            limits,
            measure_footprint(tensors, model.spec.router),
            resources=owned.pop_all(),
        )
