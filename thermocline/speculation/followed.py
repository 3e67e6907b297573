"""What a drafter keeps of the positions that a request's steps computed, until it computes them itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray, IntArray


@dataclass(slots=True)
class Followed:
    """What a drafter that reads hidden states knows of a request.

    tokens, states: of the positions first..first+len(tokens), the trunk's input there, and what it computed. num_done:
    the drafter's keys and values of so many first positions are in its cache. table: the blocks of the last chunk.
    """

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    states: list[FloatArray] = field(default_factory=list)
    num_done: int = 0
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
        self.num_done = min(self.num_done, position)

    def keep(self, start: int, tokens: list[int], states: FloatArray) -> None:
        """Add what a step computed from position `start` on. What was known there and behind it is forgotten."""
        if self.end != start:  # computed again, perhaps in other blocks
            self.keep_before(start)
        if self.end != start:
            self.first, self.tokens, self.states = start, [], []
        self.tokens += tokens
        self.states += list(states)
