"""Builds the scheduler, and the step loop that drives it. A part of the assembly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.engine.spill_builder import start_spilling
from thermocline.kv.blocks import BlockAllocator
from thermocline.kv.state_slots import StateSlots
from thermocline.modelfile.watch import ModelWatch
from thermocline.pipeline.drafting import Drafting
from thermocline.pipeline.scheduling.chunk_size import ChunkSizer
from thermocline.pipeline.scheduling.chunk_size_feedback import ChunkSizeFeedback
from thermocline.pipeline.scheduling.request_states import RequestStates
from thermocline.pipeline.scheduling.request_windows import RequestWindows
from thermocline.pipeline.scheduling.scheduler import Scheduler
from thermocline.pipeline.step_loop import StepLoop

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.engine.build_context import BuildContext
    from thermocline.engine.spill_builder import SpillTier
    from thermocline.experts.cache.lent_room import LentRoom
    from thermocline.experts.routing_log import RoutingLog
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.models.spec import ModelSpec
    from thermocline.pipeline.step_loop import ChunkRunner
    from thermocline.speculation.speculator import Speculator
    from thermocline.workers.lane import LaneThread


def build_step_loop(
    context: BuildContext,
    runner: ChunkRunner,
    cpu: LaneThread | None,
    routing_log: RoutingLog,
    speculator: Speculator | None,
    room: LentRoom | None = None,
    tier: SpillTier | None = None,
) -> StepLoop:
    """Return the step loop. room: what the cache shares with experts. cpu: whose times size prompt chunks; None leaves
    them as configured. speculator: None drafts nothing. tier: where evicted prefixes go; None where they are lost.
    """
    config, spec, cache = context.config, context.model.spec, context.devices.cache
    limits = context.limits
    num_drafts = 0 if speculator is None else cache.num_draft_states
    scheduler = Scheduler(
        replace(
            config.scheduler,
            prefill_chunk_tokens=limits.chunk_tokens,
            max_prompt_chunks=limits.max_prompt_chunks,
        ),
        BlockAllocator(cache.num_blocks, cache.block_tokens),
        limits.max_context_tokens,
        kinds_differ=context.kernels.prompts_differ,
        expanded_tokens=0 if spec.latent is None else spec.latent.expanded_tokens,
        scored_tokens=limits.scored_tokens,
        states=_request_states(config, spec, cache, num_drafts),
        windows=_request_windows(config, spec, cache.window_blocks),
        spill=None if tier is None else tier.decides,
    )
    sizer = ChunkSizer(limits.chunk_tokens, config.scheduler.decode_slowdown)
    feedback = None if cpu is None else ChunkSizeFeedback(sizer, cpu.take_times)
    watch = ModelWatch(context.file)
    drafting = None
    if cpu is not None and speculator is not None:
        drafting = Drafting(speculator, scheduler, context.recorder, cpu)
    spilling = None if tier is None else start_spilling(context, tier, scheduler)
    return StepLoop(
        scheduler, runner, context.recorder, feedback, routing_log, room, watch, drafting, spilling
    )


def _request_states(
    config: EngineConfig, spec: ModelSpec, cache: KVCacheSpec, num_drafts: int
) -> RequestStates | None:
    if not spec.has_states:
        return None
    slots = StateSlots(cache.num_live_states, cache.num_snapshots, num_drafts)
    return RequestStates(slots, config.memory.snapshot_distance_tokens)


def _request_windows(
    config: EngineConfig, spec: ModelSpec, num_blocks: int
) -> RequestWindows | None:
    if spec.window is None or not num_blocks:
        return None
    memory = config.memory
    allocator = BlockAllocator(num_blocks, memory.block_tokens)
    return RequestWindows(allocator, spec.window.num_tokens, memory.max_windows)
