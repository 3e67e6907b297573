"""The cache of a device, layer by layer, as views of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from thermocline.models.device.non_expert import DeviceNonExpert


def blocks_of(device: DeviceNonExpert) -> list[torch.Tensor]:
    """Return keys and values of each layer, [blocks, block_tokens, kv_heads, head_dim]: those of padding are the last."""
    found, strides = [], device._strides
    for layer, cache in device._caches.items():
        is_window = layer in device.spec.window_layers and device.spare.window_block
        stride = strides.window if is_window else strides.full
        parts = (part._stored for part in (cache._keys, cache._values) if part is not None)
        found += [part.unflatten(0, (-1, strides.block_tokens))[::stride] for part in parts]
    return found
