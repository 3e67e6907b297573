"""Owns the arrays of the key-value cache. Knows no request: callers say which slot a token has.

Construction reserves address space, which becomes memory only where it is written.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import CacheShape, CacheType
from thermocline.kernels.dense_contract import LayerCache
from thermocline.kv.memory import reserve
from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.kernels.cache_format import HeadShape
    from thermocline.kernels.weight import ByteArray


class KVPool:
    """Keys and values of all layers, uint8 of the shapes that its `shape` gives; see kernels.cache_format."""

    def __init__(
        self,
        heads: Sequence[HeadShape],
        num_blocks: int,
        block_tokens: int,
        cache_type: CacheType = CacheType.F32,
        *,
        own_blocks: Mapping[LayerIndex, int] | None = None,
        sources: Mapping[LayerIndex, LayerIndex] | None = None,
    ) -> None:
        """heads: by layer. own_blocks: the number of blocks of layers that differ; 0 for layers without keys and values.

        sources: of layers whose cache is another's, which they only read.
        """
        self.num_blocks = num_blocks
        """Blocks of each layer that is not in `own_blocks`."""
        self.block_tokens = block_tokens
        """Positions of a block."""
        self.type = cache_type
        own_blocks = own_blocks or {}
        self._sources = dict(sources or {})
        self._layers = {}
        for layer, of in enumerate(heads):
            blocks = own_blocks.get(LayerIndex(layer), num_blocks)
            if blocks:
                shape = CacheShape.of(cache_type, blocks, block_tokens, of)
                self._layers[LayerIndex(layer)] = _layer_cache(shape)

    def __repr__(self) -> str:
        return (
            f"KVPool({len(self._layers)} layers, {self.num_blocks} blocks of {self.block_tokens} "
            f"tokens, {self.type.name})"
        )

    @property
    def reserved_bytes(self) -> int:
        """Address space of the whole pool. Its resident part grows with use."""
        return sum(array.nbytes for cache in self._layers.values() for array in cache.arrays)

    @property
    def layers(self) -> tuple[LayerIndex, ...]:
        """The layers with arrays of their own."""
        return tuple(self._layers)

    def layer(self, layer: LayerIndex) -> LayerCache:
        """Return the cache of one layer; it is valid as long as it is referenced."""
        return self._layers[self._sources.get(layer, layer)]


def _layer_cache(shape: CacheShape) -> LayerCache:
    index = _reserve(shape.index_shape) if shape.index else None
    return LayerCache(shape, _reserve(shape.array_shape), _reserve(shape.value_shape), index)


def _reserve(shape: tuple[int, ...]) -> ByteArray:
    num_bytes = math.prod(shape)
    if not num_bytes:
        return np.empty(shape, np.uint8)
    what, fix = "the key-value cache of one layer", "choose a smaller context with --ctx"
    return reserve(num_bytes, what, fix).reshape(shape)
