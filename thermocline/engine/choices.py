"""What an engine chose: each choice with its value and its reason, read from the parts that decided.

For `--explain` and /placement. Decides nothing, and knows neither a terminal nor HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from thermocline.config import MemoryConfig
from thermocline.engine.cpu import why_threads
from thermocline.kernels.gpu.requirements import NO_DRIVER
from thermocline.messages import Chunk, ChunkId, RequestId, Segment, SegmentKind
from thermocline.models.rope import LongRope
from thermocline.pipeline.execution.policy import why as why_executed
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.config import EngineConfig
    from thermocline.engine.assembly import EngineParts
    from thermocline.engine.devices import Devices
    from thermocline.engine.expert_stages import ExpertBackends
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice. nbytes: of memory that it is about; None where it is about none. value: "" where that says all."""

    name: str
    value: str
    why: str
    nbytes: int | None = None

    def __str__(self) -> str:
        size = "" if self.nbytes is None else format_bytes(self.nbytes)
        return f"{self.name}: {', '.join(filter(None, (self.value, size)))} ({self.why})"


def read_choices(parts: EngineParts, config: EngineConfig) -> tuple[Choice, ...]:
    """Return the choices as they are now. config: as the user gave it."""
    return (
        *_about_cpu(parts, config),
        *_about_non_expert(parts, config),
        *_about_rotation(parts.model.spec),
        *_about_experts(parts, config),
        *_about_prompts(parts),
        *_about_ranks(parts),
        *_about_drafts(parts),
        *_about_execution(parts),
    )


def _about_cpu(parts: EngineParts, config: EngineConfig) -> Iterator[Choice]:
    kernels, _, threads = parts.kernels.name.partition(" x ")
    if not threads:
        yield Choice("kernels", kernels, "asked for (--kernels)")
        return
    yield Choice("threads", threads, why_threads(config))
    is_auto = config.cpu.isa == "auto"
    why = "the widest that this processor has" if is_auto else "asked for (--cpu-isa)"
    yield Choice("instruction set", kernels, why)


def _about_non_expert(parts: EngineParts, config: EngineConfig) -> Iterator[Choice]:
    """Yield where all but experts is, and how much context there is."""
    devices = parts.experts.devices
    allocation, cache = devices.allocation, devices.cache
    where, nbytes = devices.placement.trunk_device, parts.footprint.trunk_bytes
    kv_bytes = devices.needs.sizes.kv(cache.num_blocks * cache.block_tokens)
    why_contexts = "requests of full length; memory is used as they fill"
    if allocation is not None and allocation.has_non_expert:
        nbytes, kv_bytes = allocation.non_expert_bytes, allocation.kv_bytes
        why_contexts = "what the device has room for, up to what was asked for"
    asked = config.placement.trunk_device
    why = _why_where(devices, "--trunk-device", asked)
    yield Choice("non-expert weights", f"on {where}", why, nbytes)
    kv_type = cache.type.name.lower()
    yield Choice("KV cache", f"on {where}", "where the non-expert weights are", kv_bytes)
    is_default = config.memory.kv_type == MemoryConfig().kv_type
    why = "the default" if is_default else "asked for (--kv-type)"
    yield Choice("KV type", kv_type, why)
    limits, num_contexts = parts.limits, cache.num_blocks // cache.min_blocks
    yield Choice("contexts", str(num_contexts), why_contexts)
    yield Choice("context", f"{limits.max_context_tokens} tokens", limits.why_context)


def _about_rotation(spec: ModelSpec) -> Iterator[Choice]:
    """Yield by which factors heads turn, of a model that has two lists of them."""
    if isinstance(spec.rope_scaling, LongRope):
        which, how_long = ("long", "more than") if spec.turns_far else ("short", "no more than")
        why = f"the context (--ctx) is {how_long} {spec.rope_scaling.original_context} tokens"
        yield Choice("rotary factors", f"those of {which} contexts", why)


def _why_where(devices: Devices, flag: str, asked: str) -> str:
    """Return why a part that may be on a device is there, or not."""
    if asked != "auto":
        return f"asked for ({flag})"
    reasons = devices.reasons or (() if devices.allocation is None else devices.allocation.reasons)
    return "; ".join(reasons) or NO_DRIVER


def _about_experts(parts: EngineParts, config: EngineConfig) -> Iterator[Choice]:
    if not parts.model.spec.has_experts:
        why = "every layer's feed-forward is dense, and goes where the layer's other weights go"
        yield Choice("routed experts", "none", why)
        yield Choice("prefetch", config.prefetch.mode, "reads each weight once, before a prompt")
        return
    experts, footprint = parts.experts, parts.footprint
    placement = experts.placement
    counts = zip(placement.hot, footprint.expert_bytes, strict=True)
    hot_bytes = sum(len(hot) * nbytes for hot, nbytes in counts)
    wanted, asked = experts.devices.placement, config.placement.hot_device
    total = placement.num_hot + placement.num_cold
    if experts.hot_device is None and not placement.num_hot:
        why = _why_where(experts.devices, "--hot-device", asked)
        yield Choice("hot experts", "none", why)
    else:
        why = "; ".join(experts.initial_placement.reasons) or "those that are used most come"
        value = f"{placement.num_hot} of {total} on {wanted.hot_device}"
        yield Choice("hot experts", value, why, hot_bytes)
        yield from _about_hot_device(experts)
    value = f"{placement.num_cold} of {total} on cpu"
    why = "computed from the mapped file, or by workers"
    yield Choice("cold experts", value, why, footprint.experts_bytes - hot_bytes)
    governor, mode = experts.governor, config.prefetch.mode
    why = "asked for (--prefetch)"
    if mode == "auto":
        why = "twice a second it is checked whether all experts are in memory; ahead is read while some are not"
    quiet = ", all experts are in memory" if governor is not None and governor.is_quiet else ""
    yield Choice("prefetch", f"{mode}{quiet}", why)


def _about_hot_device(experts: ExpertBackends) -> Iterator[Choice]:
    device = experts.hot_device
    if device is None:
        return
    store = device.store.statistics()
    allocation = experts.devices.allocation
    why = "what slots for uploads leave"
    if allocation is not None:
        lent = () if allocation.lent is None else allocation.lent.reasons()
        why = "; ".join((*allocation.reasons, *lent))
    yield Choice("expert budget", "", why, store.capacity_bytes)
    is_static = experts.devices.placement.expert_cache == "static"
    outlook = device.policy.outlook
    is_off = is_static or device.policy.reason != ""
    yield Choice("promotion", "off" if is_off else "on", outlook)
    fewest = device.dispatcher.min_upload_tokens
    if is_static:
        yield Choice("uploads", "off", outlook)
    elif fewest == inf:
        yield Choice("uploads", "off", "the CPU ends any chunk before uploaded experts would")
    else:
        why = "by measurement, an upload then ends before the CPU would"
        yield Choice("uploads", f"from chunks of {fewest} tokens on", why)


def _about_prompts(parts: EngineParts) -> Iterator[Choice]:
    limits = parts.limits
    yield Choice("prompt chunk", f"{limits.chunk_tokens} tokens", limits.why_chunk)
    yield Choice("prompt chunks in flight", str(limits.max_prompt_chunks), limits.why_chunks)


def _about_ranks(parts: EngineParts) -> Iterator[Choice]:
    """Yield how several ranks share the model, as they are now."""
    member = parts.experts.member
    if member is None:
        return
    mesh, num_groups = member.mesh, member.total_regroups
    number = f"{mesh.size} in {len(mesh.live_replicas)} replicas"
    why = f"torchrun's; {num_groups} times some were lost" if num_groups else "started by torchrun"
    yield Choice("ranks", number, why)
    yield Choice("ranks exchange", member.way, "--rank-transport, and where the ranks are")
    num_owned = int(member.owned_mask.sum())
    yield Choice("experts of this rank", str(num_owned), member.map_reason)
    if member.on_device:
        yield Choice(
            "experts on its device", member.on_device, "as many as --device-memory has room for"
        )
    why = "what can arrive at most, for every chunk in flight"
    yield Choice("workspace of this rank", "", why, member.workspace_bytes)
    if member.all_hold_the_file:
        yield Choice("exchange", "where it is faster", "every rank's memory has room for the file")
    else:
        yield Choice("exchange", "in every step", "the memory of a rank has no room for the file")


def _about_drafts(parts: EngineParts) -> Iterator[Choice]:
    """Yield who drafts tokens of answers that ask for nobody else."""
    drafting = parts.step_loop.drafting
    if drafting is None:
        return
    speculator = drafting.speculator
    value = ", ".join(speculator.names) or "off"
    why = (
        "asked for (--speculate)"
        if speculator.names == ()
        else "each step drafts as far as measured ones say that it pays"
    )
    yield Choice("speculation", value, speculator.why_none or why)


def _about_execution(parts: EngineParts) -> Iterator[Choice]:
    """Yield how chunks that start now are executed."""
    kinds = {
        "an answer's token": (SegmentKind.DECODE, 1),
        "a prompt's chunk": (SegmentKind.PROMPT, parts.limits.chunk_tokens),
    }
    for name, (kind, num_tokens) in kinds.items():
        execution = parts.runner.execution_now(_example(kind, num_tokens))
        yield Choice(name, type(execution).__name__, why_executed(execution))


def _example(kind: SegmentKind, num_tokens: int) -> Chunk:
    numbers, none = np.arange(num_tokens, dtype=np.int32), np.empty(0, np.int32)
    segment = Segment(RequestId(0), 0, num_tokens, kind, none)
    return Chunk(ChunkId(-1), (segment,), numbers, numbers, numbers, none)
