"""Owns the numbers of the key-value cache. Knows no request: callers say in which slot a token goes.

Memory is reserved at construction and becomes real only where it is written.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ConfigError
from thermocline.kernels.contract import FloatArray, IntArray, KVView
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from thermocline.messages import LayerIndex


class KVPool:
    """Keys and values of all layers: float32 [layers][slots, kv_heads, head_dim] each."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_tokens: int, kv_heads: int, head_dim: int
    ) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self._shape = (num_blocks * block_tokens, kv_heads, head_dim)
        self._keys = [_reserve(self._shape) for _ in range(num_layers)]
        self._values = [_reserve(self._shape) for _ in range(num_layers)]

    @property
    def reserved_bytes(self) -> int:
        """Address space of the whole pool; what is resident grows with use."""
        return sum(array.nbytes for array in (*self._keys, *self._values))

    def write(
        self, layer: LayerIndex, slots: IntArray, keys: FloatArray, values: FloatArray
    ) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] of `layer` in `slots` [tokens]."""
        self._keys[layer][slots] = keys
        self._values[layer][slots] = values

    def view(self, layer: LayerIndex, block_table: IntArray) -> KVView:
        """Return `layer`'s cache as the sequence with these blocks sees it."""
        return KVView(self._keys[layer], self._values[layer], block_table, self.block_tokens)


def _reserve(shape: tuple[int, int, int]) -> FloatArray:
    num_bytes = max(math.prod(shape) * 4, 1)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"no {format_bytes(num_bytes)} of address space for the key-value cache of one layer "
            f"({error}): choose a smaller context with --ctx"
        ) from error
    return np.frombuffer(memory, np.float32, count=math.prod(shape)).reshape(shape)
