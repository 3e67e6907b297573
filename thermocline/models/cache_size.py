"""The size of a model's cache that a config asks for: blocks, windows and states. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.entries import BLOCK_STEP
from thermocline.kv.blocks import window_blocks
from thermocline.kv.cache import KVCacheSpec
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.models.spec import ModelSpec

_MIN_FULL_CONTEXTS: Final = 4
_CHEAP_BYTES: Final = 128 << 20
"""Below this, room for every request costs less than preempting some: 48 answers of 400 tokens by the demo model
fell silent for up to 35 s in a cache of 4 contexts, and for no more than a step in one of 128."""


def cache_spec(config: EngineConfig, spec: ModelSpec, limits: PromptLimits) -> KVCacheSpec:
    """Return what the cache should have. Raises ConfigError for a type or blocks that the model's heads do not fit."""
    memory = config.memory
    odd = {dim for of in spec.kv_shapes for dim in of.stored_dims if dim % 32}
    if memory.kv_type == "q8_0" and odd:
        raise ConfigError(
            f"--kv-type q8_0 needs heads of a multiple of 32 numbers, and this model's have {min(odd)}: "
            "use f16, bf16 or f32"
        )
    if spec.entries is not None and memory.block_tokens % BLOCK_STEP:
        raise ConfigError(
            f"memory.block_tokens must be a multiple of {BLOCK_STEP} for this model, whose cache holds entries of many tokens, "
            f"and not {memory.block_tokens}: leave it out, or round it up"
        )
    min_blocks = ceil_div(limits.max_context_tokens, memory.block_tokens)
    num_blocks = min_blocks * _num_contexts(config, spec, limits)
    num_window_blocks = 0
    if spec.window is not None and spec.window_layers:
        # A decode step that recomputes preempted requests has as many tokens as a prompt's chunk.
        in_flight = (limits.max_prompt_chunks + 1) * limits.chunk_tokens
        windows = memory.max_windows * window_blocks(spec.window.num_tokens, memory.block_tokens)
        num_window_blocks = min(num_blocks, windows + ceil_div(in_flight, memory.block_tokens))
    return KVCacheSpec(
        CacheType[memory.kv_type.upper()],
        memory.block_tokens,
        num_blocks,
        min_blocks,
        num_window_blocks,
        config.scheduler.max_requests + memory.max_snapshots,
        memory.max_snapshots,
        0 if not spec.has_states else config.speculation.max_draft_states,
    )


def _num_contexts(config: EngineConfig, spec: ModelSpec, limits: PromptLimits) -> int:
    """Return how many full contexts fit: as asked for, else more than the least where that is cheap."""
    if config.memory.max_full_contexts is not None:
        return config.memory.max_full_contexts
    cache_type, without = CacheType[config.memory.kv_type.upper()], set(spec.keyless_layers)
    shapes = [shape for n, shape in enumerate(spec.kv_shapes) if n not in without]
    token_bytes = sum(shape.token_bytes(cache_type) for shape in shapes)
    cheap = _CHEAP_BYTES // max(1, token_bytes * limits.max_context_tokens)
    return max(_MIN_FULL_CONTEXTS, min(cheap, config.scheduler.max_requests))
