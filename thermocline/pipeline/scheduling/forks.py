"""Blocks in which a branch of a drafted tree has keys and values of its own: its tables, and what is copied there. Pure.

A branch shares its request's blocks up to the one in which its first token lies. That one, and those behind it, are its
own, and get copies of what lies before the branch in them. If the branch is right, its blocks become the request's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import IntArray


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch's blocks. first: the place in tables of its first own block. table, window_table: int32, up to its last.

    window_table: of layers with a sliding window, where these have blocks of their own.
    """

    first: int
    table: IntArray
    window_table: IntArray | None

    @property
    def own(self) -> list[int]:
        """The blocks that are its own."""
        blocks: list[int] = self.table[self.first :].tolist()
        return blocks

    @property
    def own_window(self) -> list[int]:
        """The same in layers with a sliding window."""
        if self.window_table is None:
            return []
        blocks: list[int] = self.window_table[self.first :].tolist()
        return blocks


def forked_table(table: IntArray, first: int, own: Sequence[int]) -> IntArray:
    """Return a table with blocks of its own from place `first` on."""
    return np.concatenate((table[:first], np.array(own, np.int32)))


def slot_of(table: IntArray, position: int, block_tokens: int) -> int:
    """Return where a position lies, by its request's table."""
    return int(table[position // block_tokens]) * block_tokens + position % block_tokens
