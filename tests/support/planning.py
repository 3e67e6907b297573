"""Plans of made-up models, whose experts and weights take on a device what they take in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.experts.placement.allocation import DeviceWish, Wish, workspace_bytes
from thermocline.experts.placement.constraints import PlacementConstraints
from thermocline.experts.placement.planner import DeviceMemory, Plan, make_plan
from thermocline.kernels.cache_format import CacheType
from thermocline.kv.cache import KVCacheSpec
from thermocline.models.device.sizes import DeviceSizes, LayerOnDevice
from thermocline.models.spec import LayerKind
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from thermocline.models.sizes import ModelSizes

BLOCK_TOKENS = 16


def on_device(sizes: ModelSizes) -> DeviceSizes:
    """Return the sizes on a device that reads every layout."""
    return DeviceSizes(
        layers=tuple(
            LayerOnDevice(
                LayerKind.ATTENTION,
                layer.non_expert,
                block=BLOCK_TOKENS * layer.kv_per_token,
                state=layer.state,
            )
            for layer in sizes.layers
        ),
        head=sizes.output,
        hidden_size=sizes.hidden_size,
        num_experts=sizes.num_experts,
        experts=tuple(layer.expert for layer in sizes.layers),
        layouts=tuple(layer.layout for layer in sizes.layers),
    )


def wish_of(
    vram: int | None, *, num_tokens: int = 1024, chunk_tokens: int = 16, contexts: int = 1, **rest
) -> DeviceWish:
    """Return the wish for everything that fits."""
    blocks = ceil_div(num_tokens, BLOCK_TOKENS)
    states, snapshots = rest.pop("states", 1), rest.pop("snapshots", 0)
    cache = KVCacheSpec(
        CacheType.F16, BLOCK_TOKENS, contexts * blocks, blocks, 0, states + snapshots, snapshots
    )
    constraints = rest.pop("constraints", None) or PlacementConstraints()
    given = {"non_expert": Wish.IF_IT_FITS, "experts": Wish.IF_IT_FITS} | rest
    return DeviceWish(
        limit_bytes=vram,
        cache=cache,
        chunk_tokens=chunk_tokens,
        constraints=constraints,
        **given,
    )


def plan_of(sizes: ModelSizes, vram: int, heat=None, **rest) -> Plan:
    """Return the plan of a device with so many bytes."""
    memory = DeviceMemory(vram, vram)
    return make_plan(sizes, on_device(sizes), memory, wish_of(vram, **rest), heat)


def spare_of(sizes: ModelSizes, chunk_tokens: int = 16) -> int:
    """Return what steps take: the bytes that stay free, and places of padding."""
    there = on_device(sizes)
    return workspace_bytes(there, chunk_tokens) + there.padding
