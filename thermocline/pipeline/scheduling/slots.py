"""Which tokens each slot computed last, and who keeps their blocks while they are saved or restored. Pure.

A slot is a name for a conversation whose prompt cache clients save and restore; a request without one gets the slot whose
tokens it continues, else the one that was used longest ago. Knows no bytes and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kv.kept_prefix import HeldPrefix, PrefixParts, SequenceTokens

if TYPE_CHECKING:
    from thermocline.messages import IntArray
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_blocks import RequestBlocks


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """What a slot computed last. ids: the tokens as int64; owner: the beginning of the salt that may see them."""

    tokens: SequenceTokens
    ids: IntArray
    owner: str


class Slots:
    """The slots of one engine. All methods run between chunks."""

    def __init__(self, blocks: RequestBlocks, num_slots: int) -> None:
        self._blocks = blocks
        self.num_slots = num_slots
        self._contents: dict[int, SlotContent] = {}
        """The slot that was used last is the last one."""

    def __repr__(self) -> str:
        return f"Slots({len(self._contents)} of {self.num_slots} used)"

    def note(self, request: Request) -> None:
        """Remember what a request that ends has computed."""
        num_tokens = request.cache.num_full * self._blocks.block_tokens
        if not num_tokens or not request.may_share:
            return
        tokens = SequenceTokens(
            tuple(request.known[:num_tokens]),
            request.cache.root,
            request.num_prompt_tokens,
            request.cache.num_expanded,
        )
        owner = request.options.cache_salt or ""
        content = SlotContent(tokens, np.array(tokens.token_ids, np.int64), owner)
        slot = request.options.slot
        self._put(self._slot_for(content) if slot is None else slot, content)

    def content(self, slot: int, owner: str) -> SequenceTokens | None:
        """Return a slot's tokens; None if it is empty, or somebody else's."""
        found = self._contents.get(slot)
        return None if found is None or not found.owner.startswith(owner) else found.tokens

    def hold(self, slot: int, owner: str) -> HeldPrefix | None:
        """Keep what the cache has of a slot's tokens until `give_back`; None for nothing."""
        tokens = self.content(slot, owner)
        held = None if tokens is None else self._blocks.hold_prefix(tokens)
        return held if held is None or held.blocks else None

    def begin_restore(self, tokens: SequenceTokens, parts: PrefixParts) -> HeldPrefix | None:
        """Keep places for a sequence's parts, until `end_restore`; None if the cache has no room now."""
        return self._blocks.begin_prefix(tokens, parts)

    def end_restore(self, slot: int, owner: str, held: HeldPrefix) -> None:
        """Let requests find a sequence whose parts are written, and remember it as the slot's."""
        self._blocks.end_prefix(held, is_written=True)
        tokens = held.tokens
        self._put(slot, SlotContent(tokens, np.array(tokens.token_ids, np.int64), owner))

    def give_back(self, held: HeldPrefix) -> None:
        """Keep a prefix no longer. What was to be written is lost."""
        self._blocks.end_prefix(held, is_written=False)

    def erase(self, slot: int, owner: str) -> int:
        """Forget a slot's tokens, and evict those of its blocks that nobody else needs; return how many tokens it had."""
        tokens = self.content(slot, owner)
        if tokens is None:
            return 0
        content = self._contents.pop(slot)
        shared = max((_num_shared(content, other) for other in self._contents.values()), default=0)
        self._blocks.evict_prefix(tokens, first=-(-shared // self._blocks.block_tokens))
        return len(tokens.token_ids)

    def _put(self, slot: int, content: SlotContent) -> None:
        self._contents.pop(slot, None)
        self._contents[slot] = content

    def _slot_for(self, content: SlotContent) -> int:
        """Return the slot whose tokens this one continues, else an empty one, else the one used longest ago."""
        for slot, other in reversed(self._contents.items()):
            if _num_shared(content, other) * 2 >= len(other.ids):
                return slot
        for slot in range(self.num_slots):
            if slot not in self._contents:
                return slot
        return next(iter(self._contents))


def _num_shared(one: SlotContent, other: SlotContent) -> int:
    """Return how many first tokens two contents share."""
    if one.tokens.root != other.tokens.root:
        return 0
    length = min(len(one.ids), len(other.ids))
    differ = np.flatnonzero(one.ids[:length] != other.ids[:length])
    return int(differ[0]) if len(differ) else length
