"""Owns which full cache blocks can be found by their content, and in which order they are evicted.

A block's key is a hash of all tokens up to its last one, so blocks with equal keys hold equal keys and
values. Pure. Knows no request.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from thermocline.kv.blocks import BlockAllocator

_KEY_BYTES = 16


def root_key(salt: str | None) -> bytes:
    """Return the parent key of a first block. Requests share blocks only if their salts are equal."""
    content = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=_KEY_BYTES).digest()


def block_key(
    parent: bytes, token_ids: Sequence[int], num_decoded: int, num_expanded: int = 0
) -> bytes:
    """Return the key of a full block after the block with key `parent`.

    num_decoded: how many of its last tokens were computed with the arithmetic of decoding. num_expanded: how many of
    its first ones took the expanded form of latent attention.
    """
    content = array("q", token_ids)
    content.append(num_decoded)
    if num_expanded:
        content.append(num_expanded)
    return blake2b(parent + content.tobytes(), digest_size=_KEY_BYTES).digest()


class PrefixCache:
    """Allocates, shares and releases blocks; keeps findable ones until room is needed.

    Evicts the least recently used block first, and children before their parents.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._blocks: dict[bytes, int] = {}
        self._links: dict[int, tuple[bytes, bytes | None]] = {}
        """The key of each findable block, and that of its parent."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.total_evicted = 0
        """Blocks evicted so far."""
        self.num_changes = 0
        """How often what is evicted next has changed, in order or number."""
        self.on_forget: Callable[[bytes, bool], None] | None = None
        """Told the key of each block whose content is no longer what `find` gave, before it is written again; and whether
        it was evicted."""

    def __repr__(self) -> str:
        return f"PrefixCache({len(self._blocks)} findable blocks, {len(self._idle)} of them idle)"

    @property
    def num_idle(self) -> int:
        """Findable blocks that nobody holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and idle ones."""
        return self._allocator.num_free + len(self._idle)

    def next_evicted(self, count: int) -> list[tuple[bytes, int]]:
        """Return keys and blocks of those findable ones that so many calls of `allocate` would evict, the first one first."""
        wanted = max(0, count - self._allocator.num_free)
        return [(self._links[block][0], block) for block in islice(self._idle, wanted)]

    def find(self, key: bytes) -> int | None:
        """Return the block with this content, without holding it."""
        return self._blocks.get(key)

    def is_idle(self, block: int) -> bool:
        """Whether a block is findable and nobody holds it."""
        return block in self._idle

    def share(self, block: int) -> None:
        """Hold a block that `find` returned. It is never written again."""
        assert block in self._links, f"block {block} is not findable"
        self._allocator.share(block)
        self.num_changes += 1
        self._idle.pop(block, None)

    def allocate(self) -> int | None:
        """Return a block for one holder alone, evicting an idle one if need be; None if all are held."""
        if not self._allocator.num_free and self._idle:
            self.evict(next(iter(self._idle)))
        self.num_changes += 1
        return self._allocator.allocate()

    def publish(self, block: int, key: bytes, parent: bytes | None = None) -> None:
        """Make a held, full and computed block findable, unless another block has its content.

        parent: the key of the block before it, if this one is useless without that.
        """
        assert self._allocator.num_holders(block), f"block {block} is not held"
        if key not in self._blocks:
            self._blocks[key] = block
            self._links[block] = (key, parent)

    def release(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Stop holding the blocks of one sequence, in its order. keys: those of its published blocks."""
        self.num_changes += 1
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if self._allocator.release(block):
                if block in self._links:
                    self._idle[block] = None
                else:
                    self._allocator.free(block)
            # The findable block with this content may be another one. It was used now too.
            twin = self._blocks.get(keys[index]) if index < len(keys) else None
            if twin is not None and twin in self._idle:
                self._idle.move_to_end(twin)

    def drop(self, block: int) -> None:
        """Stop holding a block without children, and free it if nobody else holds it."""
        if self._allocator.release(block):
            self._forget(block)

    def evict(self, block: int) -> None:
        """Free an idle block, wherever it is in line. Blocks behind it are not found until its content is computed again."""
        del self._idle[block]
        self._forget(block, is_evicted=True)
        self.total_evicted += 1

    def check_integrity(self) -> None:
        """Assert that keys, blocks and holders agree, and that children go before parents."""
        self._allocator.check_integrity()
        assert {block: key for key, block in self._blocks.items()} == {
            block: key for block, (key, _) in self._links.items()
        }, "the index and the links disagree"
        place = {block: index for index, block in enumerate(self._idle)}
        for block, (_, parent) in self._links.items():
            is_held = self._allocator.num_holders(block) > 0
            assert is_held != (block in place), f"block {block} must be either held or idle"
            parent_block = None if parent is None else self._blocks.get(parent)
            if not is_held and parent_block in place:
                assert place[block] < place[parent_block], "a parent would go before its child"
        assert self._links.keys() >= place.keys(), "an idle block can not be found"
        not_free = self._allocator.num_blocks - self._allocator.num_free
        held = sum(self._allocator.num_holders(b) > 0 for b in range(self._allocator.num_blocks))
        assert held + len(place) == not_free, "a block is neither free, idle nor held"

    def check_holders(self, sequences: Iterable[tuple[Sequence[int], int]]) -> None:
        """Assert that these sequences hold every held block, and that none may write a shared one.

        sequences: of each one its blocks, and how many leading ones are full, so never written again.
        """
        held, writable = Counter[int](), list[int]()
        for blocks, num_full in sequences:
            assert len(blocks) == len(set(blocks)), "a block is twice in a table"
            held.update(blocks)
            writable += blocks[num_full:]
        for block in range(self._allocator.num_blocks):
            assert held[block] == self._allocator.num_holders(block), f"block {block}: wrong count"
        assert all(held[block] == 1 for block in writable), "a block is shared and written"

    def _forget(self, block: int, *, is_evicted: bool = False) -> None:
        """Free a block that nobody holds, findable or not."""
        if block in self._links:
            key, _ = self._links.pop(block)
            del self._blocks[key]
            self.num_changes += 1
            if self.on_forget is not None:
                self.on_forget(key, is_evicted)
        self._allocator.free(block)
