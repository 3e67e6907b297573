"""Builds an engine's parts from a file and a config, in one visible order, and closes them in reverse.

Everything is made here and handed over complete; no part looks for another.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ConfigError, ModelFileError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.compute import CpuExpertCompute
from thermocline.experts.heat import ExpertHeat
from thermocline.experts.placement import Placement, placement_fingerprint, uniform_placement
from thermocline.experts.routing_log import RoutingLog
from thermocline.experts.simulated import CopyEngine, DeviceExperts, SimulatedExpertCompute
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.lane import LaneThread
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.blocks import BlockAllocator
from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.kv.recurrent import StatePool
from thermocline.kv.state_slots import StateSlots
from thermocline.messages import LayerIndex, Tier
from thermocline.modelfile.reader import open_model_file
from thermocline.models.footprint import measure_footprint, trunk_tensors
from thermocline.models.registry import open_model
from thermocline.pipeline.chunk_size import ChunkSizer
from thermocline.pipeline.graph import Shortcut, moe_graph
from thermocline.pipeline.loop import StepLoop
from thermocline.pipeline.pace import Pace
from thermocline.pipeline.request_states import RequestStates
from thermocline.pipeline.runner import Runner
from thermocline.pipeline.scheduler import Scheduler
from thermocline.prefetch.memory import page_cache_room_bytes
from thermocline.prefetch.opening import open_governor
from thermocline.remote.balance import Balance
from thermocline.remote.runtime import OpenedModel, open_remote
from thermocline.remote.shares import assign_experts
from thermocline.sampling.matcher import Grammars
from thermocline.stages.attend import AttendStage
from thermocline.stages.cold import ColdStage
from thermocline.stages.combine import CombineStage
from thermocline.stages.embed import EmbedStage
from thermocline.stages.head import HeadStage
from thermocline.stages.hot import HotStage
from thermocline.stages.layer import LayerStage
from thermocline.stages.prefetch import PrefetchStage
from thermocline.stages.remote import RemoteStage
from thermocline.stages.router import RouterStage
from thermocline.text.template_holder import TemplateHolder
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import MemoryRecorder
from thermocline.units import ceil_div

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Any

    from numpy.typing import NDArray

    from thermocline.config import EngineConfig
    from thermocline.kernels.contract import Kernels
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.models.footprint import Footprint
    from thermocline.models.spec import ModelSpec
    from thermocline.prefetch.governor import PrefetchGovernor
    from thermocline.remote.compute import RemoteExpertCompute
    from thermocline.remote.shares import Assignment
    from thermocline.stages.contract import Stage
    from thermocline.traces.recorder import Recorder

# A context that nobody asked for should not reserve tens of gigabytes of address space.
_DEFAULT_MAX_CONTEXT_TOKENS = 32768

# Beyond 512 tokens a chunk computes hardly faster. A file that does not fit is read once for each chunk.
_CHUNK_TOKENS = 512
_CHUNK_TOKENS_OF_LARGE_FILES = 2048


class LoadStep(StrEnum):
    """What opening a model consists of, in order."""

    FILE = "file"
    WEIGHTS = "weights"
    TOKENIZER = "tokenizer"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that one engine consists of."""

    model: Model
    kernels: Kernels
    tokenizer: Tokenizer
    placement: Placement
    hot_mask: NDArray[np.bool_]
    """Which experts are hot, [layers, experts]."""
    heat: ExpertHeat
    governor: PrefetchGovernor | None
    remote: RemoteExpertCompute | None
    recorder: MemoryRecorder
    lanes: tuple[LaneThread, ...]
    runner: Runner
    step_loop: StepLoop
    max_context_tokens: int
    chunk_tokens: int
    """The most prompt tokens of one chunk."""
    footprint: Footprint
    template: TemplateHolder
    grammars: Grammars
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

    on_step is told what begins. Raises ModelError, ConfigError or NativeModuleError.
    """
    on_step(LoadStep.FILE)
    with ExitStack() as resources:
        parts = _build(path, config, resources, on_step)
        resources.pop_all()
        return parts


def _build(
    path: str | os.PathLike[str],
    config: EngineConfig,
    resources: ExitStack,
    on_step: Callable[[LoadStep], None],
) -> EngineParts:
    owned = ExitStack()
    resources.callback(owned.close)
    file = owned.enter_context(open_model_file(path))
    recorder = MemoryRecorder(config.trace.max_records, enabled=config.trace.enabled)
    kernels = _kernels(config)
    on_step(LoadStep.WEIGHTS)
    model = open_model(file, kernels)
    on_step(LoadStep.TOKENIZER)
    tokenizer, template, grammars = _text(file, model, owned)
    spec = model.spec
    max_context_tokens = _context(config, spec.context_length)
    cache, allocator = _cache(config, spec, max_context_tokens)
    on_step(LoadStep.EXPERTS)
    catalog = ExpertCatalog(model.expert_layers)
    is_split = config.placement.hot_device != "none"
    placement = uniform_placement(
        spec.num_layers,
        spec.router.num_experts,
        config.placement.hot_fraction if is_split else 0.0,
        spec.num_dense_layers,
    )
    hot_mask = np.array([placement.hot_mask(LayerIndex(n)) for n in range(spec.num_layers)])
    heat = ExpertHeat(spec.num_layers, spec.router.num_experts)
    routing_log = RoutingLog()
    cpu = owned.enter_context(
        LaneThread(
            Lane.CPU,
            recorder,
            timeline=kernels.timeline(),
            slowdown=config.scheduler.decode_slowdown,
        )
    )
    lanes = [cpu]
    fingerprint = placement_fingerprint(spec, placement)
    assignment = assign_experts(
        hot_mask, len(config.remote.workers), config.remote.share, spec.num_dense_layers
    )

    balance = _balance(config)

    def cpu_experts(tier: Tier) -> CpuExpertCompute:
        told = None if balance is None else balance.observe_here
        return CpuExpertCompute(tier, fingerprint, catalog, kernels, cpu, told)

    stages: dict[str, Stage[Any, Any]] = {
        "embed": EmbedStage(model, cpu),
        "attend": AttendStage(model, cache, cpu),
        "router": RouterStage(
            model,
            placement,
            heat,
            routing_log,
            cpu,
            assignment.mask if config.remote.workers else None,
        ),
        "cold": ColdStage(cpu_experts(Tier.COLD)),
        "combine": CombineStage(kernels.dense, cpu),
        "head": HeadStage(model, cpu),
    }
    if is_split:
        stages["hot"] = HotStage(
            cpu_experts(Tier.HOT)
            if config.placement.hot_device == "cpu"
            else _simulated(config, catalog, placement, fingerprint, recorder, owned, lanes)
        )
    opened = OpenedModel(
        file, model, config.cpu.isa, fingerprint, cpu_experts(Tier.REMOTE), balance
    )
    remote = _remote(config, opened, assignment, recorder, owned)
    if remote is not None:
        stages["remote"] = RemoteStage(remote)
    governor = _governor(config, file, model, catalog, hot_mask | assignment.mask, recorder, owned)
    if governor is not None:
        stages["prefetch"] = PrefetchStage(governor, spec.router)
    shortcut = (
        None if is_split or remote else _shortcut(model, cache, heat, routing_log, cpu, governor)
    )
    runner = Runner(
        # One more credit than prompts take: a decode step finds one, always.
        moe_graph(stages, spec.num_layers, config.scheduler.max_prompt_chunks + 1, shortcut),
        recorder,
        cpu,
        overlap=config.scheduler.overlap,
    )
    chunk_tokens = config.scheduler.prefill_chunk_tokens or _chunk_tokens(file)
    scheduler = Scheduler(
        replace(config.scheduler, prefill_chunk_tokens=chunk_tokens),
        allocator,
        max_context_tokens,
        kinds_differ=kernels.prompts_differ,
        states=_request_states(config, spec),
    )
    return EngineParts(
        model=model,
        kernels=kernels,
        tokenizer=tokenizer,
        placement=placement,
        hot_mask=hot_mask,
        heat=heat,
        governor=governor,
        remote=remote,
        recorder=recorder,
        lanes=tuple(lanes),
        runner=runner,
        step_loop=StepLoop(
            scheduler, runner, recorder, _pace(config, chunk_tokens, cpu), routing_log
        ),
        max_context_tokens=max_context_tokens,
        chunk_tokens=chunk_tokens,
        footprint=measure_footprint(
            trunk_tensors(file.tensors.values(), spec.num_layers), spec.router
        ),
        template=template,
        grammars=grammars,
        resources=owned,
    )


def _text(
    file: ModelFile, model: Model, owned: ExitStack
) -> tuple[Tokenizer, TemplateHolder, Grammars]:
    tokenizer = _tokenizer(file, model)
    source = file.metadata.get_str("tokenizer.chat_template", default="")
    template, grammars = TemplateHolder(source, tokenizer), Grammars(tokenizer)
    owned.callback(template.close)
    owned.callback(grammars.close)
    return tokenizer, template, grammars


def _governor(
    config: EngineConfig,
    file: ModelFile,
    model: Model,
    catalog: ExpertCatalog,
    elsewhere: NDArray[np.bool_],
    recorder: Recorder,
    owned: ExitStack,
) -> PrefetchGovernor | None:
    """elsewhere: bool [layers, experts], those that are not computed from this process's file."""
    if config.prefetch.mode == "off":
        return None
    probes = config.prefetch.mode == "auto"
    governor = open_governor(file, model, catalog, elsewhere, recorder, probes=probes)
    owned.callback(governor.close)
    return governor


def _balance(config: EngineConfig) -> Balance | None:
    is_wanted = config.remote.workers and config.remote.mode == "auto"
    return Balance(len(config.remote.workers)) if is_wanted else None


def _remote(
    config: EngineConfig,
    opened: OpenedModel,
    assignment: Assignment,
    recorder: Recorder,
    owned: ExitStack,
) -> RemoteExpertCompute | None:
    if not config.remote.workers:
        return None
    remote = open_remote(config.remote, opened, assignment, recorder)
    owned.callback(remote.close)
    return remote


def _pace(config: EngineConfig, chunk_tokens: int, cpu: LaneThread) -> Pace:
    return Pace(ChunkSizer(chunk_tokens, config.scheduler.decode_slowdown), cpu.take_times)


def _simulated(
    config: EngineConfig,
    catalog: ExpertCatalog,
    placement: Placement,
    fingerprint: str,
    recorder: Recorder,
    owned: ExitStack,
    lanes: list[LaneThread],
) -> SimulatedExpertCompute:
    wanted = config.placement
    experts = DeviceExperts(catalog, placement, wanted.simulated_memory_bytes)
    engine_lane = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
    engine = CopyEngine(engine_lane, wanted.simulated_copy_bytes_per_s)
    # The hot tier's arithmetic is the cold one's: the same kernels, on a thread of the device's own.
    kernels = _kernels(config, threads=1)
    device = owned.enter_context(LaneThread(Lane.HOT, recorder))
    lanes += (engine_lane, device)
    return SimulatedExpertCompute(fingerprint, experts, kernels, device, engine)


def _shortcut(
    model: Model,
    cache: SequenceCache,
    heat: ExpertHeat,
    routing_log: RoutingLog,
    cpu: LaneThread,
    governor: PrefetchGovernor | None,
) -> Shortcut | None:
    if not model.has_whole_layers:
        return None

    def nothing_to_hint() -> bool:  # hints are made between a layer's parts
        return governor is None or governor.is_quiet

    return Shortcut(
        LayerStage(model, cache, heat, routing_log, cpu), model.spec.num_layers, nothing_to_hint
    )


def _kernels(config: EngineConfig, threads: int | None = None) -> Kernels:
    if config.kernels == "reference":
        return ReferenceKernels()
    cpu = config.cpu
    return NativeKernels(cpu.isa, threads or cpu.threads, pin=cpu.pin)


def _chunk_tokens(file: ModelFile) -> int:
    fits = file.total_tensor_bytes <= page_cache_room_bytes()
    return _CHUNK_TOKENS if fits else _CHUNK_TOKENS_OF_LARGE_FILES


def _context(config: EngineConfig, context_length: int) -> int:
    wanted = config.memory.max_context_tokens
    if wanted is None:
        return min(context_length, _DEFAULT_MAX_CONTEXT_TOKENS)
    if wanted > context_length:
        raise ConfigError(
            f"--ctx is {wanted}, but the model was trained for {context_length}: choose at most that"
        )
    return wanted


def _cache(
    config: EngineConfig, spec: ModelSpec, max_context_tokens: int
) -> tuple[SequenceCache, BlockAllocator]:
    memory = config.memory
    num_blocks = ceil_div(max_context_tokens, memory.block_tokens) * memory.max_full_contexts
    pool = KVPool(
        spec.num_layers,
        num_blocks,
        memory.block_tokens,
        spec.num_kv_heads,
        spec.head_dim,
        _cache_type(memory.kv_type, spec.head_dim),
        without=spec.recurrent_layers,
    )
    states = None
    if spec.delta is not None:
        num_slots = config.scheduler.max_requests + memory.max_snapshots
        states = StatePool(spec.recurrent_layers, num_slots, spec.delta)
    return SequenceCache(pool, states), BlockAllocator(num_blocks, memory.block_tokens)


def _request_states(config: EngineConfig, spec: ModelSpec) -> RequestStates | None:
    if spec.delta is None:
        return None
    slots = StateSlots(config.scheduler.max_requests, config.memory.max_snapshots)
    return RequestStates(slots, config.memory.snapshot_distance_tokens)


def _cache_type(name: str, head_dim: int) -> CacheType:
    if name == "q8_0" and head_dim % 32:
        raise ConfigError(
            f"--kv-type q8_0 needs heads of a multiple of 32 numbers, and this model's have {head_dim}: "
            "use f16, bf16 or f32"
        )
    return CacheType[name.upper()]


def _tokenizer(file: ModelFile, model: Model) -> Tokenizer:
    tokenizer = Tokenizer(TokenizerData.from_metadata(file.metadata, path=file.path))
    if tokenizer.vocab_size != model.spec.vocab_size:
        raise ModelFileError(
            file.path,
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the embedding has "
            f"{model.spec.vocab_size} rows",
            fix="convert or download the model again",
        )
    return tokenizer
