"""Builds an engine's parts from a file and a config, in one visible order, and closes them in reverse.

Everything is made here and handed over complete; no part looks for another.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ConfigError, EngineClosedError, ModelFileError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.compute import CpuExpertCompute
from thermocline.experts.heat import ExpertHeat
from thermocline.experts.placement import Placement, placement_fingerprint, uniform_placement
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
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.cache_model import CacheModel
from thermocline.prefetch.governor import PrefetchGovernor
from thermocline.prefetch.memory import page_cache_room_bytes
from thermocline.prefetch.predictor import Predictor
from thermocline.prefetch.readers import ReaderThreads
from thermocline.prefetch.residency import ResidencyProbe
from thermocline.stages.attend import AttendStage
from thermocline.stages.cold import ColdStage
from thermocline.stages.combine import CombineStage
from thermocline.stages.embed import EmbedStage
from thermocline.stages.head import HeadStage
from thermocline.stages.hot import HotStage
from thermocline.stages.layer import LayerStage
from thermocline.stages.prefetch import PrefetchStage
from thermocline.stages.router import RouterStage
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import MemoryRecorder, NullRecorder
from thermocline.units import ceil_div

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Any

    from thermocline.config import EngineConfig
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.timeline import PoolTimeline
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.contract import Model
    from thermocline.models.spec import ModelSpec
    from thermocline.stages.contract import Stage
    from thermocline.traces.recorder import Recorder

# A context that nobody asked for should not reserve tens of gigabytes of address space.
_DEFAULT_MAX_CONTEXT_TOKENS = 32768

# Memory that is left to others when experts are read ahead: activations, the kernel's own, other programs.
_SPARE_BYTES = 256 << 20


class TemplateHolder:
    """Starts the chat template's child process when the first chat prompt asks for it."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None
        self._closed = False

    def get(self) -> ChatTemplate:
        """Return the template, from any thread.

        Raises ConfigError when the file has none, ChatTemplateError if it is bad, EngineClosedError
        after `close`.
        """
        if not self._source:
            raise ConfigError(
                "this model file has no chat template: give a plain prompt, or use an instruct model"
            )
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: open a new one")
            if self._template is None:
                tokenizer = self._tokenizer
                self._template = ChatTemplate(
                    self._source,
                    bos_token=_token_text(tokenizer, tokenizer.bos_id),
                    eos_token=_token_text(tokenizer, tokenizer.eos_id),
                    control_tokens=tokenizer.control_texts,
                )
            return self._template

    def close(self) -> None:
        """End the child process, if there is one, and start no other."""
        with self._lock:
            self._closed = True
            if self._template is not None:
                self._template.close()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that one engine consists of."""

    model: Model
    kernels: Kernels
    tokenizer: Tokenizer
    placement: Placement
    heat: ExpertHeat
    governor: PrefetchGovernor | None
    recorder: Recorder
    runner: Runner
    step_loop: StepLoop
    max_context_tokens: int
    token_bytes: int | None
    """What one decoded token makes the engine read, at least; None when that is not known."""
    template: TemplateHolder
    resources: ExitStack

    def close(self) -> None:
        """Close every resource in reverse order of its making."""
        self.resources.close()


def load_parts(path: str | os.PathLike[str], config: EngineConfig) -> EngineParts:
    """Open the file and build all parts; on any error, what was opened is closed again.

    Raises ModelError, ConfigError or NativeModuleError.
    """
    with ExitStack() as resources:
        parts = _build(path, config, resources)
        resources.pop_all()
        return parts


def _build(path: str | os.PathLike[str], config: EngineConfig, resources: ExitStack) -> EngineParts:
    owned = ExitStack()
    resources.callback(owned.close)
    file = owned.enter_context(open_model_file(path))
    recorder = _recorder(config)
    kernels = _kernels(config)
    model = open_model(file, kernels)
    tokenizer = Tokenizer(TokenizerData.from_metadata(file.metadata, path=file.path))
    _require_equal_vocabularies(file, model, tokenizer)
    source = file.metadata.get_str("tokenizer.chat_template", default="")
    template = TemplateHolder(source, tokenizer)
    owned.callback(template.close)
    spec = model.spec
    max_context_tokens = _context(config, spec.context_length)
    cache, allocator = _cache(config, spec, max_context_tokens)
    catalog = ExpertCatalog(model.expert_layers)
    is_split = config.placement.hot_device != "none"
    hot_fraction = config.placement.hot_fraction if is_split else 0.0
    placement = uniform_placement(
        spec.num_layers, spec.router.num_experts, hot_fraction, spec.num_dense_layers
    )
    heat = ExpertHeat(spec.num_layers, spec.router.num_experts)
    cpu = owned.enter_context(
        LaneThread(
            Lane.CPU,
            recorder,
            timeline=_timeline(config, kernels),
            slowdown=config.scheduler.decode_slowdown,
        )
    )
    fingerprint = placement_fingerprint(spec, placement)

    def cpu_experts(tier: Tier) -> CpuExpertCompute:
        return CpuExpertCompute(tier, fingerprint, catalog, kernels, cpu)

    stages: dict[str, Stage[Any, Any]] = {
        "embed": EmbedStage(model, cpu),
        "attend": AttendStage(model, cache, cpu),
        "router": RouterStage(model, placement, heat, cpu),
        "cold": ColdStage(cpu_experts(Tier.COLD)),
        "combine": CombineStage(kernels.dense, cpu),
        "head": HeadStage(model, cpu),
    }
    if is_split:
        stages["hot"] = HotStage(
            cpu_experts(Tier.HOT)
            if config.placement.hot_device == "cpu"
            else _simulated(config, catalog, placement, fingerprint, recorder, owned)
        )
    governor = None
    if config.prefetch.mode != "off":
        governor = _governor(config, file, model, catalog, placement, recorder)
        owned.callback(governor.close)
        stages["prefetch"] = PrefetchStage(governor, spec.router)
    shortcut = None
    if model.has_whole_layers and not is_split:
        stage = LayerStage(model, cache, heat, cpu)
        shortcut = Shortcut(stage, spec.num_layers, _nothing_to_hint(governor))
    num_credits = config.scheduler.max_prompt_chunks + 1  # a decode step finds one, always
    runner = Runner(
        moe_graph(stages, spec.num_layers, num_credits, shortcut),
        recorder,
        cpu,
        overlap=config.scheduler.overlap,
    )
    scheduler = Scheduler(
        config.scheduler,
        allocator,
        max_context_tokens,
        kinds_differ=kernels.prompts_differ,
        states=_request_states(config, spec),
    )
    sizer = ChunkSizer(config.scheduler.prefill_chunk_tokens, config.scheduler.decode_slowdown)
    return EngineParts(
        model=model,
        kernels=kernels,
        tokenizer=tokenizer,
        placement=placement,
        heat=heat,
        governor=governor,
        recorder=recorder,
        runner=runner,
        step_loop=StepLoop(scheduler, runner, recorder, Pace(sizer, cpu.take_times)),
        max_context_tokens=max_context_tokens,
        token_bytes=measure_footprint(
            trunk_tensors(file.tensors.values(), spec.num_layers), spec.router
        ).token_bytes,
        template=template,
        resources=owned,
    )


def _simulated(
    config: EngineConfig,
    catalog: ExpertCatalog,
    placement: Placement,
    fingerprint: str,
    recorder: Recorder,
    owned: ExitStack,
) -> SimulatedExpertCompute:
    wanted = config.placement
    experts = DeviceExperts(catalog, placement, wanted.simulated_memory_bytes)
    engine_lane = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
    engine = CopyEngine(engine_lane, wanted.simulated_copy_bytes_per_s)
    # The hot tier's arithmetic is the cold one's: the same kernels, on a thread of the device's own.
    kernels = _kernels(config, threads=1)
    device = owned.enter_context(LaneThread(Lane.HOT, recorder))
    return SimulatedExpertCompute(fingerprint, experts, kernels, device, engine)


def _nothing_to_hint(governor: PrefetchGovernor | None) -> Callable[[], bool]:
    """Whether a layer's parts may run in one: hints are made between them."""
    return (lambda: True) if governor is None else (lambda: governor.is_quiet)


def _governor(
    config: EngineConfig,
    file: ModelFile,
    model: Model,
    catalog: ExpertCatalog,
    placement: Placement,
    recorder: Recorder,
) -> PrefetchGovernor:
    layers = [LayerIndex(n) for n in range(catalog.num_layers)]
    reserved_bytes = file.total_tensor_bytes - catalog.total_bytes + _SPARE_BYTES

    def room_bytes() -> int:
        return page_cache_room_bytes() - reserved_bytes

    advisor = PageAdvisor(file)
    # Advice: where the kernel refuses it, more is read than is needed, and nothing else.
    with suppress(OSError):
        for layer in layers:
            advisor.stop_read_ahead(catalog.layer_spans(layer))
    expert_bytes = [catalog.expert_bytes(layer) for layer in layers]
    cold = ~np.array([placement.hot_mask(layer) for layer in layers])
    cold[: model.spec.num_dense_layers] = False  # nothing to fetch
    return PrefetchGovernor(
        CacheModel(expert_bytes, catalog.num_experts, room_bytes()),
        Predictor(model.router_weights, catalog.num_layers, catalog.num_experts),
        ReaderThreads(catalog, advisor, recorder),
        recorder,
        cold=cold,
        room_bytes=room_bytes,
        probe=ResidencyProbe(file, catalog) if config.prefetch.mode == "auto" else None,
    )


def _kernels(config: EngineConfig, threads: int | None = None) -> Kernels:
    if config.kernels == "reference":
        return ReferenceKernels()
    cpu = config.cpu
    return NativeKernels(cpu.isa, threads or cpu.threads, pin=cpu.pin)


def _timeline(config: EngineConfig, kernels: Kernels) -> PoolTimeline | None:
    return kernels.timeline() if config.trace.enabled else None


def _recorder(config: EngineConfig) -> Recorder:
    return MemoryRecorder(config.trace.max_events) if config.trace.enabled else NullRecorder()


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


def _require_equal_vocabularies(file: ModelFile, model: Model, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size != model.spec.vocab_size:
        raise ModelFileError(
            file.path,
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the embedding has "
            f"{model.spec.vocab_size} rows",
            fix="convert or download the model again",
        )


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
