"""What a model would take of this machine's memory if it were opened, from its file's header alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.engine.cache_builder import choose_limits
from thermocline.engine.devices import uses_gpu
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.messages import LayerIndex
from thermocline.models.cache_size import cache_spec
from thermocline.models.registry import read_spec
from thermocline.models.sizes import lasting_bytes

if TYPE_CHECKING:
    import os

    from thermocline.config import EngineConfig
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Memory of one model, in bytes, at most.

    host_bytes: all tensors that memory should hold, which are mapped, and the cache and its second tier when every block of them is in use. uses_device: whether a GPU
    computes a part of it; device_bytes: what it may take there, None for all that is free.
    """

    host_bytes: int
    uses_device: bool = False
    device_bytes: int | None = None


def model_needs(path: str | os.PathLike[str], config: EngineConfig) -> ModelNeeds:
    """Return what the model at `path` would take with this config. Raises ModelError, ConfigError and NativeModuleError."""
    with open_guarded_model(path) as file:
        spec = read_spec(file)
        cache = cache_spec(config, spec, choose_limits(config, spec, file))
        weights = lasting_bytes(file.tensors.values(), spec)
        host_bytes = weights + cache_bytes(spec, cache) + (config.memory.spill_bytes or 0)
    return ModelNeeds(host_bytes, uses_gpu(config), config.placement.device_memory_bytes)


def cache_bytes(spec: ModelSpec, cache: KVCacheSpec) -> int:
    """Return the bytes of a model's whole cache: keys, values and recurrent states of all layers."""
    blocks = dict.fromkeys(spec.window_layers, cache.window_blocks)
    blocks |= dict.fromkeys(spec.keyless_layers, 0)
    keys_and_values = sum(
        shape.token_bytes(cache.type)
        * cache.block_tokens
        * blocks.get(LayerIndex(layer), cache.num_blocks)
        for layer, shape in enumerate(spec.kv_shapes)
    )
    return keys_and_values + cache.num_state_slots * spec.sequence_state_bytes
