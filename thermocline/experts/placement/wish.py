"""What a config wants of a device, for `allocation.py`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError
from thermocline.experts.placement.allocation import DeviceWish, Wish
from thermocline.experts.placement.constraints import PlacementConstraints, parse_experts
from thermocline.experts.placement.placement import uniform_placement
from thermocline.experts.placement.tensor_overrides import OverriddenParts, overridden_parts
from thermocline.models.device.part import DevicePart
from thermocline.models.device.sizes import measure_device_sizes
from thermocline.models.sizes import measure_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.config import PlacementConfig
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.models.device.sizes import DeviceSizes
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.models.sizes import ModelSizes
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What decides about a device's memory besides the device: sizes in the file and there, and the cache asked for.

    tensors: the model's, by which --override-tensor names its parts. speculates: whether steps there have drafted rows,
    unless a request alone asks for them.
    """

    sizes: ModelSizes
    on_device: DeviceSizes
    cache: KVCacheSpec
    chunk_tokens: int
    tensors: tuple[TensorInfo, ...] = ()
    speculates: bool = True


def device_needs(
    tensors: Iterable[TensorInfo],
    spec: ModelSpec,
    cache: KVCacheSpec,
    limits: PromptLimits,
    *,
    speculates: bool = True,
) -> DeviceNeeds:
    """Return the needs of the model that consists of `tensors`."""
    table = tuple(tensors)
    in_flight = limits.max_prompt_chunks * limits.chunk_tokens
    sizes = measure_sizes(table, spec, cache.type, in_flight_tokens=in_flight)
    on_device = measure_device_sizes(table, spec, sizes, cache)
    return DeviceNeeds(sizes, on_device, cache, limits.chunk_tokens, table, speculates)


def explicit_placement(asked: PlacementConfig, needs: DeviceNeeds) -> PlacementConfig:
    """Return the config with what --gpu-layers and --override-tensor mean in --trunk-device, --hot and --cold.

    A model without routed experts has nothing that could be hot: a device that was asked for gets whole layers. Raises
    ConfigError for flags that exclude each other, and what `overridden_parts` raises.
    """
    if not needs.sizes.num_experts:
        asked = _without_experts(asked)
    overrides = _overrides(asked, needs)
    part, trunk = _asked_part(asked, needs), asked.trunk_device
    is_empty = part is not None and part.is_empty
    wants = bool(asked.gpu_layers) or overrides.wants_non_expert
    if (trunk == "cpu" and wants) or (trunk not in ("auto", "cpu") and is_empty):
        raise ConfigError(
            f"--trunk-device {trunk} and what --gpu-layers or --override-tensor say of non-expert weights exclude each "
            "other: leave one out"
        )
    if trunk == "auto" and is_empty:
        trunk = "cpu"
    elif trunk == "auto" and wants:
        trunk = "torch-cpu" if asked.hot_device == "torch-cpu" else "cuda"
    hot, cold = (
        tuple(str(layer) for layer, there in overrides.experts.items() if there is wanted)
        for wanted in (True, False)
    )
    if hot and asked.hot_device == "none":
        raise ConfigError(
            "--override-tensor puts experts on the device, and --hot-device none keeps them on the CPU: leave one out"
        )
    return replace(asked, trunk_device=trunk, hot=(*asked.hot, *hot), cold=(*asked.cold, *cold))


def _without_experts(asked: PlacementConfig) -> PlacementConfig:
    for flag, named in (("--hot", asked.hot), ("--cold", asked.cold)):
        if named:
            raise ConfigError(f"the model has no routed experts: leave out {flag}")
    trunk = asked.trunk_device
    if trunk == "auto" and (asked.hot_device == "cuda" or asked.hot_device == "torch-cpu"):
        trunk = asked.hot_device
    return replace(asked, trunk_device=trunk, hot_device="none", n_cpu_moe=0, cpu_moe=False)


def _asked_part(config: PlacementConfig, needs: DeviceNeeds) -> DevicePart | None:
    """Return which non-expert weights a config asks for on a device, None where it does not say."""
    num_layers = len(needs.sizes.layers)
    overrides = _overrides(config, needs)
    if config.gpu_layers is None and overrides.head is None and not overrides.non_expert:
        return None
    count = num_layers + 1 if config.gpu_layers is None else config.gpu_layers
    part = DevicePart.last(num_layers, count)
    layers = tuple(n for n in range(num_layers) if overrides.non_expert.get(n, n in part.layers))
    has_head = part.has_head if overrides.head is None else overrides.head
    return DevicePart(num_layers, layers, has_head)


def _overrides(config: PlacementConfig, needs: DeviceNeeds) -> OverriddenParts:
    return overridden_parts(config.override_tensor, needs.tensors, len(needs.sizes.layers))


def device_wish(
    asked: PlacementConfig,
    chosen: PlacementConfig,
    needs: DeviceNeeds,
    limit_bytes: int | None,
) -> DeviceWish:
    """Return what is wanted; what was asked for must fit.

    asked: as `explicit_placement` returns it. chosen: the same with a device in place of each "auto". Raises what
    `overridden_parts` raises.
    """
    non_expert = experts = Wish.NO
    if chosen.trunk_device != "cpu":
        non_expert = Wish.IF_IT_FITS if asked.trunk_device == "auto" else Wish.YES
    if chosen.is_gpu_hot:
        experts = Wish.IF_IT_FITS if asked.hot_device == "auto" else Wish.YES
    constraints = placement_constraints(chosen, needs.sizes)
    most = chosen.expert_budget_bytes
    if limit_bytes is None:
        memory = chosen.simulated_memory_bytes
        most = memory if most is None else min(most, memory)
    most_hot = None
    if chosen.expert_cache == "static":
        most_hot = most_hot_of(chosen.hot_fraction, needs.sizes, constraints)
    # On the CPU, copies of states are memory only once they are used.
    cache = needs.cache if needs.speculates else replace(needs.cache, num_draft_states=0)
    return DeviceWish(
        limit_bytes,
        non_expert,
        experts,
        cache,
        needs.chunk_tokens,
        constraints,
        most,
        most_hot,
        _asked_part(asked, needs),
    )


def placement_constraints(config: PlacementConfig, sizes: ModelSizes) -> PlacementConstraints:
    """Return what the config says about experts. Raises ConfigError for those that the model does not have."""
    if not config.has_hot_tier:
        return PlacementConstraints()
    return PlacementConstraints(
        cpu_layers=len(sizes.layers) if config.cpu_moe else config.n_cpu_moe,
        hot=parse_experts("--hot", config.hot, sizes),
        cold=parse_experts("--cold", config.cold, sizes),
    )


def most_hot_of(
    share: float, sizes: ModelSizes, constraints: PlacementConstraints
) -> tuple[int, ...]:
    """Return how many experts of each layer a fixed set can have.

    The set has the bytes of an even share, but may take them in any layer: where a layer's own count would be
    exceeded, others give as much.
    """
    spread = uniform_placement(len(sizes.layers), sizes.num_experts, share, sizes.dense_layers)
    return tuple(
        len(
            {(layer, expert) for expert in hot}
            | {key for key in constraints.hot if key[0] == layer}
        )
        for layer, hot in enumerate(spread.hot)
    )
