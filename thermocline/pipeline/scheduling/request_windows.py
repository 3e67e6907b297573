"""Gives requests blocks of layers with a sliding window, and frees those that the window has passed.

Such a layer needs only the latest tokens. Owns these layers' prefix cache and what each request holds in
them. Knows no queue and no chunk. Of the other layers' blocks it knows only the number and the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kv.blocks import window_blocks
from thermocline.kv.prefix import PrefixCache
from thermocline.kv.spill_index import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.kv.blocks import BlockAllocator
    from thermocline.kv.kept_prefix import HeldPrefix
    from thermocline.messages import IntArray, RequestId
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_spill import RequestSpill

# Of a long prompt one window in four stays findable: a quarter of its bytes.
_WINDOWS_APART = 4


@dataclass(slots=True)
class WindowBlocks:
    """What one running request holds in layers with a window: blocks from the `num_passed`th on."""

    window_table: IntArray
    """int32, as long as the table of the other layers. Chunks in flight hold views of it."""
    num_shared: int
    """Leading blocks that it found computed, passed ones included."""
    num_passed: int
    """Leading blocks that no token to come attends to."""
    window_blocks: list[int] = field(default_factory=list)


class RequestWindows:
    """The blocks of all running requests in layers with a window.

    Each index of a request's block table stands for the same tokens as in other layers. Passed blocks are
    freed, but for those with which another request is likely to begin: they stay findable until room is needed.
    """

    def __init__(self, allocator: BlockAllocator, window_tokens: int, max_windows: int) -> None:
        """max_windows: how many windows all running requests may need. The rest is for chunks in flight."""
        self._allocator = allocator
        self._cache = PrefixCache(allocator)
        self._max_blocks = window_blocks(window_tokens, allocator.block_tokens)
        self._max_needed = max_windows * self._max_blocks
        self._forked: dict[RequestId, list[int]] = {}
        """Blocks of branches of drafted trees."""
        self.held: dict[RequestId, WindowBlocks] = {}
        """What each running request holds. Only this class changes it."""
        assert self._max_blocks <= self._max_needed, "not even one request has room"

    def __repr__(self) -> str:
        return f"RequestWindows({self._allocator}, {self._cache})"

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer with a window."""
        return self._allocator.num_blocks

    @property
    def num_held(self) -> int:
        """How many of them requests hold."""
        return self.num_blocks - self._cache.num_available

    @property
    def has_room(self) -> bool:
        """Whether `extend` has a block to give."""
        return self._cache.num_available > 0

    @property
    def num_available(self) -> int:
        """Blocks that `extend` could give, one after another."""
        return self._cache.num_available

    def fits(self, footprints: Iterable[int]) -> bool:
        """Whether requests that need so many blocks of other layers may run at the same time."""
        needed = sum(min(num_blocks, self._max_blocks) for num_blocks in footprints)
        return needed <= self._max_needed

    @property
    def cache(self) -> PrefixCache:
        """What evicts blocks."""
        return self._cache

    def last_window(self, num_blocks: int) -> range:
        """Return the indices of the blocks that the token after so many full blocks attends to."""
        return range(self._first_seen(num_blocks), num_blocks)

    def num_usable(
        self, keys: Sequence[bytes], num_blocks: int, spill: RequestSpill | None = None
    ) -> int:
        """Return the longest prefix, of at most `num_blocks` blocks, whose last window is in the cache, or spilt."""
        index = num_blocks - 1
        while index >= self._first_seen(num_blocks):
            if self._cache.find(keys[index]) is None and not (
                spill is not None and spill.has(PartKind.WINDOW, keys[index])
            ):
                num_blocks = index
            index -= 1
        return num_blocks

    def acquire(self, request: Request, num_shared: int) -> None:
        """Share the last window of a usable prefix of `num_shared` blocks."""
        assert request.id not in self.held, f"request {request.id} has blocks already"
        table = np.zeros_like(request.cache.table)
        held = WindowBlocks(table, num_shared, self._first_seen(num_shared))
        self.held[request.id] = held
        for key in request.cache.keys[held.num_passed : num_shared]:
            block = self._cache.find(key)
            assert block is not None, "a window is not usable"
            self._cache.share(block)
            self._append(held, block)

    def extend(self, request: Request) -> None:
        """Give the request one more block of its own. The caller has asked whether there is room."""
        block = self._cache.allocate()
        assert block is not None, "ask for room first"
        self._append(self.held[request.id], block)

    def fork(self, request: Request, count: int) -> list[int]:
        """Give the request blocks for a branch of drafted tokens. The caller has asked whether there is room."""
        found = [self._cache.allocate() for _ in range(count)]
        blocks = [block for block in found if block is not None]
        assert len(blocks) == count, "ask for room first"
        self._forked.setdefault(request.id, []).extend(blocks)
        return blocks

    def adopt(self, request: Request, index: int, block: int) -> None:
        """Let a branch's block be the request's at a place of its table."""
        held, forked = self.held[request.id], self._forked[request.id]
        at = index - held.num_passed
        forked[forked.index(block)] = held.window_blocks[at]
        held.window_blocks[at] = block
        held.window_table = held.window_table.copy()  # chunks have views of it
        held.window_table[index] = block

    def drop_forks(self, request: Request) -> None:
        """Take the blocks of branches from a request."""
        for block in self._forked.pop(request.id, ()):
            self._cache.drop(block)

    def shrink(self, request: Request) -> None:
        """Take the request's last block, into which only tokens were written that are taken back."""
        self._cache.drop(self.held[request.id].window_blocks.pop())

    def commit(self, request: Request, published: range) -> None:
        """Publish the blocks with these indices; drop those that no token after the computed ones attends to."""
        held = self.held[request.id]
        for index in published:
            block = held.window_blocks[index - held.num_passed]
            self._cache.publish(block, request.cache.keys[index])
        first_seen = self._first_seen(request.computed // self._allocator.block_tokens)
        num_dropped = first_seen - held.num_passed
        for index, block in enumerate(held.window_blocks[:num_dropped], held.num_passed):
            if self._is_likely_start(request, held, index):
                self._cache.release([block], request.cache.keys[index : index + 1])
            else:
                self._cache.drop(block)
        del held.window_blocks[:num_dropped]
        held.num_passed = first_seen

    def release(self, request: Request) -> None:
        """Take all blocks from a request without chunks in flight."""
        self.drop_forks(request)
        held = self.held.pop(request.id)
        keys = request.cache.keys[held.num_passed : request.cache.num_full]
        self._cache.release(held.window_blocks, keys)

    def hold(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Hold those of a sequence's blocks that are here, by index, until `end_hold`."""
        found = {index: self._cache.find(key) for index, key in enumerate(keys)}
        held = {index: block for index, block in found.items() if block is not None}
        for block in held.values():
            self._cache.share(block)
        return held

    def begin_hold(
        self, keys: Sequence[bytes], indices: Iterable[int]
    ) -> tuple[dict[int, int], frozenset[int]]:
        """Hold places for some of a sequence's blocks, by index, and say which are new. Those without room are left out."""
        held, missing = {}, []
        for index in indices:
            block = self._cache.find(keys[index])
            if block is None:
                missing.append(index)
            else:
                self._cache.share(block)
                held[index] = block
        new = set()
        for index in missing:  # now nothing of the sequence is evicted for another part of it
            block = self._cache.allocate()
            if block is None:
                break
            new.add(index)
            held[index] = block
        return held, frozenset(new)

    def end_hold(self, held: HeldPrefix, *, is_written: bool) -> None:
        """Give held blocks back; new ones that are written are found from now on."""
        for index, block in held.windows.items():
            if is_written and index in held.new_windows:
                self._cache.publish(block, held.keys[index])
            self._cache.release([block], held.keys[index : index + 1])

    def check_integrity(
        self, requests: Iterable[Request], others: Iterable[HeldPrefix] = ()
    ) -> None:
        """Assert that exactly the admitted ones among these requests hold what their next tokens attend to.

        others: what is held besides.
        """
        self._cache.check_integrity()
        admitted = {request.id: request for request in requests if request.is_admitted}
        assert self.held.keys() == admitted.keys(), "a window is missing or was not released"
        for number, held in self.held.items():
            request, first, blocks = admitted[number], held.num_passed, held.window_blocks
            assert first + len(blocks) == len(request.cache.blocks), "layers differ in length"
            seen = self._first_seen(request.computed // self._allocator.block_tokens)
            assert first == seen, f"{first} blocks are passed, not {seen}"
            assert held.window_table[first : first + len(blocks)].tolist() == blocks
        assert self._forked.keys() <= self.held.keys(), "branches of nobody"
        holders = [
            (held.window_blocks, max(admitted[number].cache.num_full - held.num_passed, 0))
            for number, held in self.held.items()
        ]
        holders += [(list(other.windows.values()), len(other.windows)) for other in others]
        self._cache.check_holders([*holders, *((blocks, 0) for blocks in self._forked.values())])

    def _first_seen(self, num_blocks: int) -> int:
        """Return the first block that the token after so many full blocks attends to."""
        return max(0, num_blocks - self._max_blocks + 1)

    def _is_likely_start(self, request: Request, held: WindowBlocks, index: int) -> bool:
        """Whether block `index` is in the window of a token with which another request is likely to begin.

        That is where this request began, where the prefix ended that layers which keep all tokens had for it,
        at the end of its prompt with or without the last token, and at regular distances before that.
        """
        block_tokens, num_prompt_tokens = self._allocator.block_tokens, request.num_prompt_tokens
        num_matched = request.cache.num_matched
        last = num_prompt_tokens // block_tokens
        distance = _WINDOWS_APART * self._max_blocks
        return (
            index < held.num_shared
            or self._first_seen(num_matched) <= index < num_matched
            or self._first_seen((num_prompt_tokens - 1) // block_tokens) <= index < last
            or (index < last and index % distance >= self._first_seen(distance))
        )

    def _append(self, held: WindowBlocks, block: int) -> None:
        held.window_table[held.num_passed + len(held.window_blocks)] = block
        held.window_blocks.append(block)
