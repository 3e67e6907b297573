"""Chooses the limits of prompts, sizes the cache of keys, values and recurrent states, and makes it on the CPU. A part of the assembly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.engine.cpu import multiplies_on_tiles
from thermocline.engine.devices import uses_device
from thermocline.experts.placement.wish import device_needs
from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.kv.recurrent import StatePool
from thermocline.models.cache_size import cache_spec
from thermocline.models.prompt_limits import prompt_limits
from thermocline.models.sizes import lasting_bytes
from thermocline.prefetch.memory import page_cache_room_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from thermocline.config import EngineConfig
    from thermocline.experts.placement.wish import DeviceNeeds
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.messages import LayerIndex
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KeptCache:
    """The CPU's cache, and the file of the model that it is of: what prompt caches are saved from and restored to."""

    file: ModelFile
    cache: SequenceCache


def choose_limits(config: EngineConfig, spec: ModelSpec, file: ModelFile) -> PromptLimits:
    """Return the config's limits, or the defaults for this file. Raises ConfigError for too long a context, and NativeModuleError."""
    room_bytes = page_cache_room_bytes()
    return prompt_limits(
        *(config, spec, lasting_bytes(file.tensors.values(), spec), room_bytes),
        on_device=uses_device(config),
        on_tiles=multiplies_on_tiles(config),
    )


def device_needs_of(
    config: EngineConfig, spec: ModelSpec, limits: PromptLimits, file: ModelFile
) -> DeviceNeeds:
    """Return what decides about a device's memory, the cache that the config asks for among it. Raises ConfigError."""
    cache, tensors = cache_spec(config, spec, limits), file.tensors.values()
    return device_needs(
        *(tensors, spec, cache, limits),
        speculates=config.speculation.drafters != "off",
    )


def cpu_cache(
    cache: KVCacheSpec, spec: ModelSpec, elsewhere: Collection[LayerIndex]
) -> SequenceCache:
    """Return an empty cache in the CPU's memory. elsewhere: layers whose cache is on a device, under the same places."""
    main = {n: shape for n, shape in spec.main_states.items() if n not in elsewhere}
    pool = KVPool(
        spec.kv_shapes,
        cache.num_blocks,
        cache.block_tokens,
        cache.type,
        own_blocks=dict.fromkeys(spec.window_layers, cache.window_blocks)
        | dict.fromkeys(spec.keyless_layers, 0)
        | dict.fromkeys(elsewhere, 0),
        sources=spec.kv_sources,
    )
    if not spec.has_states:
        return SequenceCache(pool)
    further = {n: shape for n, shape in spec.further_states.items() if n not in elsewhere}
    return SequenceCache(pool, StatePool(cache.num_state_slots, main, further))
