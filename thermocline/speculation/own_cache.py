"""A drafter's cache beside the drafted model's: the same blocks, and some of nobody's for the drafts on their way.

So what is shared, freed or taken back of the model's keys and values is so of the drafter's. Knows no request and no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import fitting_type
from thermocline.kv.memory import reserve
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.cache_format import CacheType, HeadShape
    from thermocline.kernels.weight import FloatArray, IntArray


class OwnCache:
    """Keys and values of a drafter's layers."""

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        cache_type: CacheType,
        num_blocks: int,
        block_tokens: int,
        *,
        max_requests: int,
        draft_tokens: int,
    ) -> None:
        """num_blocks, block_tokens: of the drafted model's cache. max_requests: for so many at a time drafts are made, of at
        most `draft_tokens` tokens. Raises ConfigError where there is no room.
        """
        self.block_tokens, self._num_blocks = block_tokens, num_blocks
        self._own_blocks = ceil_div(draft_tokens, block_tokens) + 1
        self.pool = KVPool(
            tuple(shapes),
            num_blocks + max_requests * self._own_blocks,
            block_tokens,
            fitting_type(cache_type, tuple(shapes)),
        )
        self.layers = tuple(map(LayerIndex, range(len(shapes))))

    def __repr__(self) -> str:
        return f"OwnCache({len(self.layers)} layers, {self._num_blocks} blocks)"

    def slots(self, table: IntArray, positions: IntArray) -> IntArray:
        """Return where the keys and values of positions go, int32 [T]. table: the blocks of their sequence."""
        size = np.int32(self.block_tokens)
        slots: IntArray = table[positions // size] * size + positions % size
        return slots

    def table_for_draft(self, number: int, table: IntArray, end: int) -> IntArray:
        """Return the blocks of the positions before `end`, then nobody's for what follows in draft `number` of a step.

        Blocks that were taken for drafted tokens may be another's by now.
        """
        kept = table[: ceil_div(end, self.block_tokens)]
        first = self._num_blocks + number * self._own_blocks
        return np.concatenate((kept, np.arange(first, first + self._own_blocks, dtype=np.int32)))


class BlockEnds:
    """The state at each block's last position, for requests that begin behind it."""

    def __init__(self, num_blocks: int, block_tokens: int, width: int) -> None:
        """width: numbers of a state. Raises ConfigError where there is no room."""
        memory = reserve(
            num_blocks * width * 4, "states at the ends of cache blocks", "choose a smaller --ctx"
        )
        self._block_tokens = block_tokens
        self._states = memory.view(np.float32).reshape(num_blocks, width)

    def __repr__(self) -> str:
        return f"BlockEnds({len(self._states)} blocks)"

    def note(self, table: IntArray, start: int, states: FloatArray) -> None:
        """Keep those of states [T, width], of positions from `start` on, that are at the ends of blocks."""
        size = self._block_tokens
        for row in range((-start - 1) % size, len(states), size):
            self._states[table[(start + row) // size]] = states[row]

    def before(self, table: IntArray, start: int) -> FloatArray:
        """Return the state [width] of the position before `start`; zeros where it is not the end of a block."""
        if start and start % self._block_tokens == 0:
            found: FloatArray = self._states[table[start // self._block_tokens - 1]]
            return found
        return np.zeros(self._states.shape[1], np.float32)
