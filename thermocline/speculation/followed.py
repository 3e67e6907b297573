"""What a drafter keeps of the positions that a request's steps computed, until it computes them itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kv.pool import KVPool
    from thermocline.messages import LayerIndex
    from thermocline.speculation.contract import Verified


@dataclass(slots=True)
class Followed:
    """What a drafter that reads hidden states knows of a request.

    tokens, states: of the positions first..first+len(tokens), the trunk's input there, and what it computed. done: of each
    part of the drafter, of how many first positions its keys and values are in its cache. table: the blocks of the last chunk.
    """

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    states: list[FloatArray] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0])
    table: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def end(self) -> int:
        """The position behind those that are known."""
        return self.first + len(self.tokens)

    def state_at(self, position: int) -> FloatArray | None:
        """Return the trunk's state at a position, None where it is not kept."""
        at = position - self.first
        return self.states[at] if 0 <= at < len(self.states) else None

    def keep_from(self, position: int) -> None:
        """Forget what lies before a position."""
        count = min(max(position - self.first, 0), len(self.tokens))
        del self.tokens[:count], self.states[:count]
        self.first += count

    def keep_before(self, position: int) -> None:
        """Forget what lies at a position and behind it."""
        count = max(position - self.first, 0)
        del self.tokens[count:], self.states[count:]
        self.done = [min(count, position) for count in self.done]

    def take(self, verified: Verified) -> None:
        """Keep of the rows of a step those that stay."""
        at = verified.position - self.first
        if not verified.is_chain and at >= 0 and at + verified.num_drafted < len(self.tokens):
            places = [at, *(at + row for row in verified.rows)]
            self.tokens[at : at + len(places)] = [self.tokens[place] for place in places]
            self.states[at : at + len(places)] = [self.states[place] for place in places]
        self.keep_before(verified.position + verified.num_accepted + 1)

    def keep(self, start: int, tokens: list[int], states: FloatArray) -> None:
        """Add what a step computed from position `start` on. What was known there and behind it is forgotten."""
        if self.end != start:  # computed again, perhaps in other blocks
            self.keep_before(start)
        if self.end != start:
            self.first, self.tokens, self.states = start, [], []
        self.tokens += tokens
        self.states += list(states)


def follow_moves(
    followed: Followed, verified: Verified, pool: KVPool, layers: Sequence[LayerIndex]
) -> None:
    """Copy blocks of a drafter's cache whose places a branch's blocks have taken; the request's table changes with them."""
    if not verified.moved:
        return
    replaced = dict(verified.moved)
    for layer in layers:
        cache = pool.layer(layer)
        for old, new in verified.moved:
            for array in cache.arrays:
                array[new] = array[old]
    table = [replaced.get(block, block) for block in followed.table.tolist()]
    followed.table = np.array(table, np.int32)
