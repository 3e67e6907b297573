"""Owns which cache blocks are free. Pure; knows neither requests nor what a block holds."""

from __future__ import annotations

from thermocline.units import ceil_div


class BlockAllocator:
    """Hands out blocks 0..num_blocks-1, each to one holder at a time; the lowest free ones first."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block on top
        self._taken: set[int] = set()

    def __repr__(self) -> str:
        return f"BlockAllocator({len(self._free)} of {self.num_blocks} blocks free)"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` positions need."""
        return ceil_div(num_tokens, self.block_tokens)

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Return `num_blocks` block ids, or None, taking nothing, when so many are not free."""
        if num_blocks > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
        self._taken.update(blocks)
        return blocks

    def release(self, blocks: tuple[int, ...]) -> None:
        """Give back blocks from `allocate`. Giving back a free block is our bug."""
        assert self._taken.issuperset(blocks), f"blocks {blocks} are not all taken"
        self._taken.difference_update(blocks)
        self._free.extend(sorted(blocks, reverse=True))

    def check_integrity(self) -> None:
        """Assert that every block is free or taken, exactly once."""
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert self._taken.isdisjoint(self._free), "a block is both free and taken"
        assert len(self._free) + len(self._taken) == self.num_blocks, "a block is lost"
