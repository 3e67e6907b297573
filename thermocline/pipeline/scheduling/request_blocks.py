"""Gives requests their cache blocks, shared or their own, and says how much room there is.

Owns the prefix cache, its counters and the record of what each request holds. Knows no queue and no chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kv.kept_prefix import HeldPrefix, PrefixParts, SequenceTokens
from thermocline.kv.prefix import PrefixCache, block_key
from thermocline.kv.spill_index import PartKind
from thermocline.pipeline.scheduling.cache_snapshot import CacheSnapshot
from thermocline.pipeline.scheduling.forks import Fork, forked_table
from thermocline.pipeline.scheduling.request import RequestCache, Returning
from thermocline.pipeline.scheduling.request_spill import missing_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thermocline.kv.blocks import BlockAllocator
    from thermocline.kv.lending import SegmentLending, SegmentMoves
    from thermocline.kv.spill_index import PartCopy
    from thermocline.messages import RequestId, StateUse
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_spill import RequestSpill, SpillRead
    from thermocline.pipeline.scheduling.request_states import RequestStates
    from thermocline.pipeline.scheduling.request_windows import RequestWindows, WindowBlocks


class RequestBlocks:
    """The blocks of all requests, and through it their windows and recurrent states."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        shares_prefixes: bool,
        kinds_differ: bool,
        states: RequestStates | None = None,
        windows: RequestWindows | None = None,
        spill: RequestSpill | None = None,
    ) -> None:
        """states: None where no layer is recurrent. windows: None where layers with a sliding window, if there
        are any, keep all tokens. spill: None where what is evicted is lost.
        """
        self.num_blocks = allocator.num_blocks
        self.block_tokens = allocator.block_tokens
        """Positions of a block."""
        self._allocator = allocator
        self._cache = PrefixCache(allocator)
        self._shares_prefixes = shares_prefixes
        self._kinds_differ = kinds_differ
        self._states = states
        self._windows = windows
        self._parts = [part for part in (states, windows) if part is not None]
        """What layers hold that do not keep all tokens."""
        self._spill = spill
        if spill is not None:
            spill.attach(PartKind.BLOCK, self._cache)
            if windows is not None:
                spill.attach(PartKind.WINDOW, windows.cache)
            if states is not None:
                spill.attach(PartKind.STATE, states.slots)
        self._forked: dict[RequestId, list[int]] = {}
        """Blocks of branches of drafted trees."""
        self._total_queried_tokens = 0
        self._total_hit_tokens = 0

    def __repr__(self) -> str:
        windows = "" if self._windows is None else f", {self._windows}"
        return f"RequestBlocks({self._allocator}, {self._cache}{windows})"

    @property
    def windows(self) -> Mapping[RequestId, WindowBlocks] | None:
        """What each running request holds in layers with a window, where they have blocks of their own."""
        return None if self._windows is None else self._windows.held

    def snapshot(self) -> CacheSnapshot:
        """Return the present numbers."""
        free, idle = self._allocator.num_free, self._cache.num_idle
        return CacheSnapshot(
            num_blocks=self.num_blocks,
            num_free_blocks=free,
            num_cached_blocks=idle,
            num_held_blocks=self.num_blocks - free - idle,
            total_evicted_blocks=self._cache.total_evicted,
            total_queried_tokens=self._total_queried_tokens,
            total_hit_tokens=self._total_hit_tokens,
            num_window_blocks=0 if self._windows is None else self._windows.num_blocks,
            num_held_window_blocks=0 if self._windows is None else self._windows.num_held,
        )

    def footprint(self, request: Request) -> int:
        """Return the blocks that all known tokens need, and one for the tokens that come next."""
        room = min(len(request.known) + self.block_tokens, request.max_total_tokens)
        return self._allocator.blocks_for(room)

    def find_prefix(self, request: Request) -> list[int]:
        """Return the blocks of the longest computed prefix that the request may share.

        The last token is never among them: it must be computed for its logits.
        """
        if not (self._shares_prefixes and request.may_share):
            return []
        found: list[int] = []
        for index in range((len(request.known) - 1) // self.block_tokens):
            block = self._cache.find(self._key(request, index))
            if block is None:
                break
            found.append(block)
        request.cache.num_matched = len(found)
        return found[: self._num_usable(request.cache.keys, len(found))]

    def bring_back(self, request: Request, num_found: int) -> bool:
        """Order spilt parts of a prefix, if they go beyond so many blocks and that pays; whether the request waits."""
        spill, cache = self._spill, request.cache
        is_prepared = cache.returning is Returning.PREPARED
        may_ask = self._shares_prefixes and request.may_share
        if spill is None or not may_ask or not spill.begin(request):
            return False
        end = cache.num_matched
        while end < (len(request.known) - 1) // self.block_tokens:
            key = self._key(request, end)
            if self._cache.find(key) is None and not spill.has(PartKind.BLOCK, key):
                break
            end += 1
        end = self._num_usable(cache.keys, end, spill)
        if end <= num_found:
            return False
        parts = PrefixParts(
            end,
            () if self._windows is None else tuple(self._windows.last_window(end)),
            () if self._states is None else (end - 1,),
        )
        num_tokens = (end - num_found) * self.block_tokens
        missing = missing_parts(cache.keys, parts, self._cache, self._windows, self._states)
        if not spill.pays(missing, num_tokens):
            return False
        if not is_prepared and spill.prepare(request, missing, end):
            return True
        tokens = SequenceTokens((), cache.root, request.num_prompt_tokens, cache.num_expanded)
        held = self._hold_places(tokens, tuple(cache.keys[:end]), parts)
        if held is None or (held.has(parts) and spill.order_read(request, held, num_tokens)):
            return held is not None
        self.end_prefix(held, is_written=False)
        return False

    def return_ended(self, read: SpillRead, damaged: Sequence[PartCopy], seconds: float) -> None:
        """Let requests find what was read, if nothing of it is damaged; else the request may ask once more."""
        assert self._spill is not None, "nothing is spilt"
        self._spill.read_ended(read, damaged, seconds)
        self.end_prefix(read.held, is_written=not damaged)

    def num_held(self, request: Request) -> int:
        """Return how many blocks are a request's, or are being filled for it."""
        returning = () if self._spill is None else self._spill.reading
        filled = (len(read.held.blocks) for read in returning if read.request is request)
        return len(request.cache.blocks) + sum(filled)

    def num_missing(self, num_blocks: int, prefix: Sequence[int]) -> int:
        """Return how many more blocks must become free before there are so many, this prefix's included."""
        num_idle = sum(self._cache.is_idle(block) for block in prefix)
        needed = num_blocks - len(prefix)
        return needed - (self._cache.num_available - num_idle)

    def windows_fit(self, requests: Iterable[Request]) -> bool:
        """Whether layers with a sliding window have room for all of these requests."""
        return self._windows is None or self._windows.fits(map(self.footprint, requests))

    @property
    def has_state(self) -> bool:
        """Whether one more request can get what recurrent layers need, now."""
        return self._states is None or self._states.has_room

    def states_fit(self, num_requests: int) -> bool:
        """Whether recurrent layers have room for so many requests at the same time."""
        return self._states is None or num_requests <= self._states.max_running

    def acquire(self, request: Request, prefix: Sequence[int]) -> None:
        """Share a prefix from `find_prefix`: its tokens count as computed."""
        cache = request.cache
        assert not cache.blocks, f"request {request.id} has blocks already"
        # Chunks of an earlier admission may still be looked at, so the table is a new one.
        cache.table = np.zeros(self._allocator.blocks_for(request.max_total_tokens), np.int32)
        for block in prefix:
            self._cache.share(block)
            self._append(cache, block)
        cache.num_full = len(prefix)
        for part in self._parts:
            part.acquire(request, len(prefix))
        if self._shares_prefixes and request.may_share:
            self._total_queried_tokens += len(request.known)
            self._total_hit_tokens += len(prefix) * self.block_tokens

    def state_use(self, request: Request, start: int, end: int) -> StateUse | None:
        """Return what tokens [start, end) do to the request's state; None where no layer is recurrent.

        Call it once for each run of tokens: its snapshots count as being written from then on.
        """
        if self._states is None:
            return None
        saves = []
        if self._shares_prefixes:
            for tokens in self._states.snapshot_tokens(request, start, end, self.block_tokens):
                key = self._key(request, tokens // self.block_tokens - 1)
                saves.append((tokens, key))
        return self._states.use(request, start, saves)

    def extend(self, request: Request) -> bool:
        """Give the request one more block of its own in every layer; False when some layer has none left."""
        if self._windows is not None and not self._windows.has_room:
            return False
        block = self._cache.allocate()
        if block is None:
            return False
        self._append(request.cache, block)
        if self._windows is not None:
            self._windows.extend(request)
        return True

    def draft_room(self, request: Request, start: int, count: int, spare_blocks: int) -> int:
        """Return for how many of `count` positions from `start` on the request has blocks, or gets them.

        None is taken unless so many are left over in each layer.
        """
        while (room := len(request.cache.blocks) * self.block_tokens - start) < count:
            windows_lack = self._windows is not None and self._windows.num_available <= spare_blocks
            lacks = self._cache.num_available <= spare_blocks or windows_lack
            if lacks or not self.extend(request):
                return room
        return count

    def fork(
        self, request: Request, parent: Fork | None, places: range, spare_blocks: int
    ) -> Fork | None:
        """Return blocks for a branch of drafted tokens at places of its tables; None where there is no room.

        parent: the branch that it leaves; None is the request's own blocks. So many blocks are left over in each layer.
        """
        room = self._cache.num_available
        if self._windows is not None:
            room = min(room, self._windows.num_available)
        count = len(places)
        if room - count < spare_blocks:
            return None
        found = [self._cache.allocate() for _ in range(count)]
        own = [block for block in found if block is not None]
        assert len(own) == count, "there was room"
        self._forked.setdefault(request.id, []).extend(own)
        before = request.cache.table if parent is None else parent.table
        window_table = None
        if self._windows is not None:
            held = self._windows.held[request.id].window_table
            below = held if parent is None else parent.window_table
            assert below is not None, "all branches have blocks in all layers"
            mine = self._windows.fork(request, count)
            window_table = forked_table(below, places.start, mine)
        return Fork(places.start, forked_table(before, places.start, own), window_table)

    def adopt(self, request: Request, fork: Fork) -> list[tuple[int, int]]:
        """Let a branch's tables be the request's, as far as both reach; return the blocks that were replaced, and by which."""
        blocks, forked, moved = request.cache.blocks, self._forked[request.id], []
        request.cache.table = request.cache.table.copy()  # chunks have views of it
        for index, block in enumerate(fork.table[: len(blocks)].tolist()):
            if block == blocks[index]:
                continue
            moved.append((blocks[index], block))
            forked[forked.index(block)] = blocks[index]
            blocks[index] = request.cache.table[index] = block
            if self._windows is not None:
                assert fork.window_table is not None, "a branch has blocks in all layers"
                self._windows.adopt(request, index, int(fork.window_table[index]))
        return moved

    def _drop_forks(self, request: Request) -> None:
        for block in self._forked.pop(request.id, ()):
            self._cache.drop(block)
        if self._windows is not None:
            self._windows.drop_forks(request)

    def draft_states(self, request: Request, count: int) -> list[int]:
        """Return slots for the state after each of `count` rows, fewer where there is no room for all."""
        assert self._states is not None, "no layer is recurrent"
        return self._states.borrow(request, count)

    def take_back(
        self, request: Request, kept_state: int, fork: Fork | None = None
    ) -> list[tuple[int, int]]:
        """Keep of a step's drafted rows those that count as computed; free what others hold.

        kept_state: the number of the slot of `draft_states` with the state after the last row that stays; the number of
        slots if that is the request's own. fork: the branch of that row; None for the request's own. Returns blocks that
        were replaced, and by which.
        """
        if self._states is not None:
            self._states.settle(request, kept_state)
        moved = [] if fork is None else self.adopt(request, fork)
        self._drop_forks(request)
        blocks, needed = request.cache.blocks, self._allocator.blocks_for(len(request.known))
        while len(blocks) > needed:
            self._cache.drop(blocks.pop())
            if self._windows is not None:
                self._windows.shrink(request)
        if request.computed >= (request.cache.num_full + 1) * self.block_tokens:
            self.commit(request)
        return moved

    def commit(self, request: Request) -> None:
        """Publish the request's blocks that are full and computed; drop those that its window has passed."""
        cache = request.cache
        num_full = request.computed // self.block_tokens
        published = range(cache.num_full, num_full) if self._shares_prefixes else range(0)
        for index in published:
            key = self._key(request, index)
            parent = cache.keys[index - 1] if index else cache.root
            self._cache.publish(cache.blocks[index], key, parent)
        cache.num_full = num_full
        for part in self._parts:
            part.commit(request, published)

    def release(self, request: Request) -> None:
        """Take everything from a request without chunks in flight."""
        assert not request.in_flight, f"request {request.id} has chunks in flight"
        cache = request.cache
        self._drop_forks(request)
        self._cache.release(cache.blocks, cache.keys[: cache.num_full])
        for part in self._parts:
            part.release(request)
        request.cache = RequestCache(cache.root, cache.keys, num_expanded=cache.num_expanded)

    def exchange(self, lending: SegmentLending) -> SegmentMoves:
        """Return which segments change hands before the next chunk. Prefixes in those that are lent are lost."""
        moves = lending.next_chunk(self._allocator.holders)
        for segment in moves.lent:
            for block in filter(self._cache.is_idle, lending.shape.blocks_of(segment)):
                self._cache.evict(block)
        return moves

    def hold_prefix(self, tokens: SequenceTokens) -> HeldPrefix:
        """Hold what the cache has of a sequence's full blocks, until `end_prefix`."""
        keys = self._keys_of(tokens)
        blocks = []
        for key in keys:
            block = self._cache.find(key)
            if block is None:
                break
            self._cache.share(block)
            blocks.append(block)
        keys = keys[: len(blocks)]
        windows = {} if self._windows is None else self._windows.hold(keys)
        states = {} if self._states is None else self._states.hold(keys)
        return HeldPrefix(tokens, keys, tuple(blocks), windows, states)

    def begin_prefix(self, tokens: SequenceTokens, parts: PrefixParts) -> HeldPrefix | None:
        """Hold places for a sequence's parts, until `end_prefix`; None if there is no room for all blocks now.

        Of windows and snapshots those are left out that have no room.
        """
        return self._hold_places(tokens, self._keys_of(tokens)[: parts.num_blocks], parts)

    def _hold_places(
        self, tokens: SequenceTokens, keys: tuple[bytes, ...], parts: PrefixParts
    ) -> HeldPrefix | None:
        found = [self._cache.find(key) for key in keys]
        # First: then nothing of the sequence is evicted for another part of it.
        shared = [block for block in found if block is not None]
        for block in shared:
            self._cache.share(block)
        if len(found) - len(shared) > self._cache.num_available:
            self._cache.release(shared, ())
            return None
        every = (self._cache.allocate() if block is None else block for block in found)
        blocks = tuple(block for block in every if block is not None)
        assert len(blocks) == len(found), "there was room"
        windows, new_windows = (
            ({}, frozenset[int]())
            if self._windows is None
            else self._windows.begin_hold(keys, parts.windows)
        )
        states, new_states = (
            ({}, frozenset[int]())
            if self._states is None
            else self._states.begin_hold(keys, parts.states)
        )
        new = frozenset(index for index, block in enumerate(found) if block is None)
        return HeldPrefix(tokens, keys, blocks, windows, states, new, new_windows, new_states)

    def end_prefix(self, held: HeldPrefix, *, is_written: bool) -> None:
        """Give a held prefix back. is_written: requests may find its new parts; otherwise they are dropped."""
        if is_written:
            for index in sorted(held.new_blocks):
                parent = held.keys[index - 1] if index else held.tokens.root
                self._cache.publish(held.blocks[index], held.keys[index], parent)
        self._cache.release(held.blocks, held.keys)
        if self._windows is not None:
            self._windows.end_hold(held, is_written=is_written)
        if self._states is not None:
            self._states.end_hold(held, is_written=is_written)

    def evict_prefix(self, tokens: SequenceTokens, first: int) -> None:
        """Free the blocks of a sequence from index `first` on that nobody holds, and forget their spilt copies."""
        keys = self._keys_of(tokens)[first:]
        for key in reversed(keys):
            block = self._cache.find(key)
            if block is not None and self._cache.is_idle(block):
                self._cache.evict(block)
        if self._spill is not None:
            self._spill.drop(keys)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that these requests are the holders of every block that is held, and no others."""
        self._cache.check_integrity()
        requests = tuple(requests)
        held = [] if self._spill is None else [read.held for read in self._spill.reading]
        for part in self._parts:
            part.check_integrity(requests, held)
        for request in requests:
            blocks = request.cache.blocks
            assert request.cache.table[: len(blocks)].tolist() == blocks
            has_slots = request.scheduled <= len(blocks) * self.block_tokens
            assert has_slots or not request.is_admitted, "tokens without a slot"
        assert self._forked.keys() <= {request.id for request in requests}, "branches of nobody"
        holders = [(request.cache.blocks, request.cache.num_full) for request in requests]
        holders += [(list(each.blocks), len(each.blocks)) for each in held]
        if self._spill is not None:
            self._spill.check_integrity()
        self._cache.check_holders([*holders, *((blocks, 0) for blocks in self._forked.values())])

    def _num_usable(
        self, keys: Sequence[bytes], num_blocks: int, spill: RequestSpill | None = None
    ) -> int:
        """Return the longest prefix, of at most `num_blocks` blocks, with what windows and recurrent layers need."""
        before = None
        while before != num_blocks:
            before = num_blocks
            for part in self._parts:
                num_blocks = part.num_usable(keys, num_blocks, spill)
        return num_blocks

    def _key(self, request: Request, index: int) -> bytes:
        """Return the key of full block `index` of the known tokens.

        Where prompt and decoded tokens differ in arithmetic, so do the keys of their blocks.
        """
        keys = request.cache.keys
        while len(keys) <= index:
            start = len(keys) * self.block_tokens
            parent = keys[-1] if keys else request.cache.root
            keys.append(
                self._block_key(
                    parent,
                    request.known[start : start + self.block_tokens],
                    start,
                    request.num_prompt_tokens,
                    request.cache.num_expanded,
                )
            )
        return keys[index]

    def _keys_of(self, tokens: SequenceTokens) -> tuple[bytes, ...]:
        """Return the keys of all full blocks of a sequence."""
        keys: list[bytes] = []
        for start in range(0, len(tokens.token_ids) - self.block_tokens + 1, self.block_tokens):
            ids = tokens.token_ids[start : start + self.block_tokens]
            parent = keys[-1] if keys else tokens.root
            keys.append(
                self._block_key(parent, ids, start, tokens.num_prompt_tokens, tokens.num_expanded)
            )
        return tuple(keys)

    def _block_key(
        self, parent: bytes, ids: Sequence[int], start: int, num_prompt: int, num_expanded: int
    ) -> bytes:
        """Return the key of the block whose first token is the `start`th of its sequence."""
        end = start + self.block_tokens
        num_decoded = max(0, end - max(start, num_prompt)) if self._kinds_differ else 0
        return block_key(parent, ids, num_decoded, max(0, min(end, num_expanded) - start))

    def _append(self, cache: RequestCache, block: int) -> None:
        cache.table[len(cache.blocks)] = block
        cache.blocks.append(block)
