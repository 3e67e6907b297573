"""Decides which parts of the cache are copied to its second tier, and which come back for a request. Pure.

Copies are made ahead: what is evicted next is in the tier already, so that no step waits for a copy. A part that changes
while it is copied is discarded. Knows no queue, no chunk, no bytes and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from thermocline.kv.spill_index import CHECKSUM_BYTES, PartCopy, PartKey, PartKind
from thermocline.pipeline.scheduling.request import Returning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from thermocline.kv.kept_prefix import HeldPrefix, PrefixParts
    from thermocline.kv.prefix import PrefixCache
    from thermocline.kv.spill_index import Demotion, SpillIndex, SpillPlace
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_states import RequestStates
    from thermocline.pipeline.scheduling.request_windows import RequestWindows
    from thermocline.pipeline.scheduling.spill_costs import SpillCosts

_BATCH_BYTES: Final = 16 << 20
"""Of copies that are made at a time: a request that wants parts back waits for no more than these."""


class Source(Protocol):
    """A cache of parts of one kind."""

    on_forget: Callable[[bytes, bool], None] | None
    num_changes: int

    def next_evicted(self, count: int) -> list[tuple[bytes, int]]:
        """Return keys and numbers of the parts that so many new ones would evict."""
        ...


@dataclass(frozen=True, slots=True)
class SpillWrite:
    """Parts to copy to the tier, after others have made room there."""

    demotions: tuple[Demotion, ...]
    copies: tuple[PartCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SpillRead:
    """Parts that a request wants back, into places that are held."""

    request: Request
    held: HeldPrefix
    copies: tuple[PartCopy, ...]
    num_tokens: int
    """Tokens that need not be computed then."""

    def bytes_by_level(self, num_levels: int) -> list[int]:
        """Return how many bytes each level gives."""
        return _by_level((copy.place for copy in self.copies), num_levels)


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """What the second tier holds, and what came of it. Parts are blocks, blocks of windows, and snapshots."""

    levels: tuple[str, ...]
    used_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    total_written_bytes: int
    total_read_bytes: int
    total_returns: int
    """Times that parts came back for a request."""
    total_returned_tokens: int
    """Tokens that were not computed again because of that."""
    total_lost: int
    """Parts that were evicted before they were copied."""
    total_dropped: int
    """Parts that the tier had no room for any more."""
    total_refused: int
    """Times that computing was expected to be faster than reading back."""
    total_damaged: int
    """Parts that the disk did not give back as they were, or not at all."""


class RequestSpill:
    """The second tier as the scheduler sees it."""

    def __init__(
        self,
        index: SpillIndex,
        costs: SpillCosts,
        part_bytes: Mapping[PartKind, int],
        ahead: Mapping[PartKind, int],
    ) -> None:
        """part_bytes: of each kind. ahead: how many parts of each kind can be evicted at once without a loss."""
        self.index = index
        self.costs = costs
        self._part_bytes = part_bytes
        self._ahead = ahead
        self._sources: dict[PartKind, Source] = {}
        self._seen: dict[PartKind, int] = {}
        """By kind, the source's changes that its `_tried` is of."""
        self._is_done = set[PartKind]()
        """Kinds of which nothing is left to copy, until their source changes."""
        self._writing: SpillWrite | None = None
        self._copied = set[PartKey]()
        """What it copies to the tier."""
        self._stale = set[PartKey]()
        """Of the parts that are being copied, those whose places are used for something else now."""
        self._tried: dict[PartKind, set[bytes]] = {}
        """By kind, what was ordered since its source's latest change: a copy that failed is not tried at once again."""
        self._preparing: list[Request] = []
        """Requests that wait until what they evict is copied."""
        self._num_wanted = 0
        """Blocks that they evict at once."""
        self._reads: list[SpillRead] = []
        """Decided, and not yet taken."""
        self.reading: list[SpillRead] = []
        """Taken, and not yet ended, and those before. Others only read it."""
        self._total_lost = self._total_refused = self._total_damaged = 0
        self._total_written_bytes = self._total_read_bytes = 0
        self._total_returns = self._total_returned_tokens = 0

    def __repr__(self) -> str:
        return f"RequestSpill({self.index}, {len(self.reading)} reads)"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being copied."""
        return self._writing is None and not self.reading

    def attach(self, kind: PartKind, source: Source) -> None:
        """Copy what this cache will evict."""
        self._sources[kind] = source
        source.on_forget = partial(self._forgotten, kind)

    def has(self, kind: PartKind, key: bytes) -> bool:
        """Whether the tier has a part."""
        return self.index.find(PartKey(kind, key)) is not None

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget all parts with these keys. What is being copied is discarded when it ends."""
        for tokens in keys:
            for kind in PartKind:
                key = PartKey(kind, tokens)
                if key in self._copied:
                    self._stale.add(key)
                else:
                    self.index.discard(key)

    def begin(self, request: Request) -> bool:
        """Whether to ask for parts of a request's prefix now."""
        asks = request.cache.returning in (Returning.NOT_ASKED, Returning.PREPARED)
        if asks:
            request.cache.returning = Returning.TRIED
        return asks

    def pays(self, wanted: Iterable[PartKey], num_tokens: int) -> bool:
        """Whether bringing these parts back is expected to be faster than computing so many tokens."""
        does = self.costs.pays(num_tokens, self._bytes_of(wanted))
        self._total_refused += not does
        return does

    def prepare(self, request: Request, wanted: Sequence[PartKey], num_blocks: int) -> bool:
        """Whether a request must wait until blocks are copied that its prefix, of so many blocks, evicts at once.

        Of blocks for which the tier has no room besides the wanted parts, the content is lost.
        """
        size = self._part_bytes[PartKind.BLOCK] + CHECKSUM_BYTES
        room = sum(self.index.capacities) - sum(self._bytes_of(wanted))
        count = min(num_blocks, room // size)
        evicted = self._sources[PartKind.BLOCK].next_evicted(count)
        if all(self.has(PartKind.BLOCK, tokens) for tokens, _ in evicted):
            return False
        for key in reversed(wanted):  # these are to go last
            self.index.touch(key)
        self._num_wanted = max(self._num_wanted, count)
        self._preparing.append(request)
        request.cache.returning = Returning.PREPARING
        return True

    def take_prepared(self) -> bool:
        """Whether requests can go on, since everything is copied that they wait for; call it when nothing is to be written."""
        if self._writing is not None or not self._preparing:
            return False
        for request in self._preparing:
            request.cache.returning = Returning.PREPARED
        self._preparing = []
        self._num_wanted = 0
        return True

    def order_read(self, request: Request, held: HeldPrefix, num_tokens: int) -> bool:
        """Have the new parts of a held prefix read; False, and nothing is read, if the tier lacks one."""
        wanted = [
            *((PartKind.BLOCK, index, held.blocks[index]) for index in sorted(held.new_blocks)),
            *((PartKind.WINDOW, index, held.windows[index]) for index in sorted(held.new_windows)),
            *((PartKind.STATE, index, held.states[index]) for index in sorted(held.new_states)),
        ]
        copies = []
        for kind, index, number in wanted:
            key = PartKey(kind, held.keys[index])
            place = self.index.find(key)
            if place is None:
                return False
            copies.append(PartCopy(key, number, place))
        for copy in reversed(copies):  # children are dropped before their parents
            self.index.touch(copy.key)
        request.cache.returning = Returning.READING
        read = SpillRead(request, held, tuple(copies), num_tokens)
        self._reads.append(read)
        self.reading.append(read)
        return True

    def take_reads(self) -> list[SpillRead]:
        """Return what is to be read, in order."""
        reads, self._reads = self._reads, []
        return reads

    def read_ended(self, read: SpillRead, damaged: Sequence[PartCopy], seconds: float) -> None:
        """Note what came of a read; damaged parts are forgotten."""
        self.reading.remove(read)
        self._total_damaged += len(damaged)
        read.request.cache.returning = Returning.NOT_ASKED if damaged else Returning.TRIED
        for copy in damaged:
            self.index.discard(copy.key, copy.place)
        if damaged:
            return
        by_level = read.bytes_by_level(len(self.index.capacities))
        self.costs.observe_read(by_level, seconds)
        self._total_read_bytes += sum(by_level)
        self._total_returns += 1
        self._total_returned_tokens += read.num_tokens

    def take_write(self) -> SpillWrite | None:
        """Return what is to be copied next; None while a copy is made, or if nothing is about to be evicted.

        The places that reads were given before hold what they held until those have ended: see SpillIndex.
        """
        if self._writing is not None:
            return None
        demotions: list[Demotion] = []
        copies: list[PartCopy] = []
        num_bytes = 0
        for kind, source in self._sources.items():
            for key, number in self._next_copied(kind, source):
                if num_bytes >= _BATCH_BYTES:
                    break
                self._tried[kind].add(key.tokens)
                place, moved = self.index.reserve(key, self._part_bytes[kind] + CHECKSUM_BYTES)
                demotions += moved
                num_bytes += sum(demotion.target.num_bytes for demotion in moved)
                if place is not None:
                    copies.append(PartCopy(key, number, place))
                    num_bytes += place.num_bytes
        if not copies and not demotions:
            return None
        self._writing = SpillWrite(tuple(demotions), tuple(copies))
        self._copied = {copy.key for copy in copies}
        return self._writing

    def write_ended(self, failed: Iterable[tuple[PartKey, SpillPlace]]) -> None:
        """Note that the copies were made, but for some."""
        assert self._writing is not None, "nothing was to be written"
        writing, self._writing = self._writing, None
        lost = set(failed)
        for key, place in lost:
            self.index.discard(key, place)
        for copy in writing.copies:
            if copy.key in self._stale:
                self.index.discard(copy.key, copy.place)
            elif (copy.key, copy.place) not in lost:
                self.index.confirm(copy.key)
                self._total_written_bytes += copy.place.num_bytes
        self._stale.clear()
        self._copied.clear()

    def limit(self, level: int, num_bytes: int) -> None:
        """Use only so many bytes of a level: more can not be written."""
        self.index.limit(level, num_bytes)

    def statistics(self, levels: tuple[str, ...]) -> SpillStatistics:
        """Return the present numbers. levels: their names. May be called from any thread."""
        return SpillStatistics(
            levels=levels,
            used_bytes=self.index.used_bytes,
            capacity_bytes=self.index.capacities,
            total_written_bytes=self._total_written_bytes,
            total_read_bytes=self._total_read_bytes,
            total_returns=self._total_returns,
            total_returned_tokens=self._total_returned_tokens,
            total_lost=self._total_lost,
            total_dropped=self.index.total_dropped,
            total_refused=self._total_refused,
            total_damaged=self._total_damaged,
        )

    def check_integrity(self) -> None:
        """Assert that the tier is whole."""
        self.index.check_integrity()
        assert self._stale <= self._copied, "a part that nobody copies is stale"

    def _next_copied(self, kind: PartKind, source: Source) -> list[tuple[PartKey, int]]:
        """Return which parts are evicted next and are not in the tier, the first one first."""
        if self._seen.get(kind) != source.num_changes:
            self._seen[kind], self._tried[kind] = source.num_changes, set()
            self._is_done.discard(kind)
        num_wanted = self._num_wanted if kind is PartKind.BLOCK else 0
        if kind in self._is_done and not num_wanted:
            return []
        # What is copied ahead must not push out what was copied before it.
        size = self._part_bytes[kind] + CHECKSUM_BYTES
        most = sum(self.index.capacities) // (2 * size * len(self._sources))
        found = []
        for tokens, number in source.next_evicted(max(num_wanted, min(self._ahead[kind], most))):
            key = PartKey(kind, tokens)
            if tokens not in self._tried[kind] and not self.index.knows(key):
                found.append((key, number))
        if not found:
            self._is_done.add(kind)
        return found

    def _bytes_of(self, wanted: Iterable[PartKey]) -> list[int]:
        places = [place for place in map(self.index.find, wanted) if place is not None]
        return _by_level(places, len(self.index.capacities))

    def _forgotten(self, kind: PartKind, tokens: bytes, is_evicted: bool) -> None:
        """Note that the cache's copy of a part is gone."""
        key = PartKey(kind, tokens)
        if key in self._copied:
            self._stale.add(key)
            self._total_lost += is_evicted
        elif not self.index.touch(key):
            self._total_lost += is_evicted


def missing_parts(
    keys: Sequence[bytes],
    parts: PrefixParts,
    cache: PrefixCache,
    windows: RequestWindows | None,
    states: RequestStates | None,
) -> list[PartKey]:
    """Return which parts of a sequence's beginning the cache lacks."""
    missing = [
        PartKey(PartKind.BLOCK, key) for key in keys[: parts.num_blocks] if cache.find(key) is None
    ]
    if windows is not None:
        window_keys = (keys[index] for index in parts.windows)
        missing += [
            PartKey(PartKind.WINDOW, key) for key in window_keys if windows.cache.find(key) is None
        ]
    if states is not None:
        state_keys = (keys[index] for index in parts.states)
        missing += [
            PartKey(PartKind.STATE, key) for key in state_keys if not states.slots.is_findable(key)
        ]
    return missing


def _by_level(places: Iterable[SpillPlace], num_levels: int) -> list[int]:
    counts = [0] * num_levels
    for place in places:
        counts[place.level] += place.num_bytes
    return counts
