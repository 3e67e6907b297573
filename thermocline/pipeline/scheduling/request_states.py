"""Gives each running request a slot of recurrent state, and decides where snapshots are taken and restored.

Owns which slots and snapshots each request holds. Knows no queue, no chunk and no cache block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.kv.spill_index import PartKind
from thermocline.messages import StateUse
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.kv.kept_prefix import HeldPrefix
    from thermocline.kv.state_slots import StateSlots
    from thermocline.messages import RequestId
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_spill import RequestSpill


@dataclass(slots=True)
class HeldState:
    """What one running request holds."""

    slot: int
    pinned: int | None
    """Slot of the snapshot that its first tokens start from. Pinned until they are computed."""
    restore: int | None
    """The same, until a chunk restores it."""
    saves: list[tuple[int, bytes]] = field(default_factory=list)
    """Snapshots that chunks in flight write: after how many tokens, under which key."""
    draft_slots: list[int] = field(default_factory=list)
    """Slots that a step in flight writes: the state after its first row, after the second, and so on, but the last."""


class RequestStates:
    """The recurrent states of all running requests."""

    def __init__(self, slots: StateSlots, snapshot_distance_tokens: int) -> None:
        """snapshot_distance_tokens: about how far apart the snapshots of a long prompt are."""
        self._slots = slots
        self._distance_tokens = snapshot_distance_tokens
        self._held: dict[RequestId, HeldState] = {}

    def __repr__(self) -> str:
        return f"RequestStates({self._slots})"

    @property
    def has_room(self) -> bool:
        """Whether `acquire` has a slot to give."""
        return self._slots.num_free > 0

    @property
    def max_running(self) -> int:
        """Requests that may run at the same time."""
        return self._slots.num_live

    @property
    def slots(self) -> StateSlots:
        """What evicts snapshots."""
        return self._slots

    def num_usable(
        self, keys: Sequence[bytes], num_blocks: int, spill: RequestSpill | None = None
    ) -> int:
        """Return the longest prefix, of at most `num_blocks` blocks, with a snapshot at its end, here or spilt."""
        while num_blocks:
            key = keys[num_blocks - 1]
            if self._slots.is_findable(key) or (
                spill is not None and spill.has(PartKind.STATE, key)
            ):
                break
            num_blocks -= 1
        return num_blocks

    def acquire(self, request: Request, num_shared: int) -> None:
        """Give a request its slot, and the snapshot after a usable prefix of `num_shared` blocks."""
        assert request.id not in self._held, f"request {request.id} has a state already"
        pinned = self._slots.pin(request.cache.keys[num_shared - 1]) if num_shared else None
        self._held[request.id] = HeldState(self._slots.acquire(), pinned, pinned)

    def snapshot_tokens(
        self, request: Request, start: int, end: int, block_tokens: int
    ) -> list[int]:
        """Return after how many tokens of [start, end) snapshots are due, all at ends of blocks.

        One is due at the last block end before the prompt's last token: the next turn of a conversation
        restores it. Others are due at regular distances, for prompts that share only their beginning.
        """
        last = (request.num_prompt_tokens - 1) // block_tokens * block_tokens
        if start >= last:
            return []
        distance = ceil_div(self._distance_tokens, block_tokens) * block_tokens
        due = {*range(distance, last + 1, distance), last}
        return sorted(tokens for tokens in due if start < tokens <= end)

    def use(self, request: Request, start: int, due: Sequence[tuple[int, bytes]]) -> StateUse:
        """Return what a run of tokens from `start` on does to the state.

        due: snapshots to take, as numbers of tokens and keys. Those that exist, or that have no room,
        are left out.
        """
        held = self._held[request.id]
        saves = []
        for tokens, key in due:
            slot = self._slots.begin(key)
            if slot is not None:
                held.saves.append((tokens, key))
                saves.append((tokens - start, slot))
        load, held.restore = held.restore, None
        return StateUse(held.slot, load, tuple(saves))

    def borrow(self, request: Request, count: int) -> list[int]:
        """Return slots for the state after each row of a step but the last, at most `count`, until `settle`."""
        held = self._held[request.id]
        assert not held.draft_slots, f"request {request.id} has drafted rows already"
        held.draft_slots = self._slots.borrow(count)
        return held.draft_slots

    def settle(self, request: Request, kept: int) -> None:
        """Let the state in borrowed slot number `kept` be the request's, its own if there is no such; give the others back."""
        held = self._held[request.id]
        if kept < len(held.draft_slots):
            held.slot, held.draft_slots[kept] = held.draft_slots[kept], held.slot
        self._give_back(held)

    def commit(self, request: Request, published: range) -> None:
        """Unpin the restored snapshot, for the first tokens are computed; publish snapshots that are written.

        published: blocks of other layers. Snapshots do not depend on them.
        """
        held = self._held[request.id]
        self._unpin(held)
        while held.saves and held.saves[0][0] <= request.computed:
            self._slots.publish(held.saves.pop(0)[1])

    def release(self, request: Request) -> None:
        """Take the slot from a request without chunks in flight; discard its unfinished snapshots."""
        held = self._held.pop(request.id)
        self._give_back(held)
        self._slots.release(held.slot)
        self._unpin(held)
        for _, key in held.saves:
            self._slots.discard(key)

    def hold(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Pin the snapshots behind a sequence's blocks, by the block's index, until `end_hold`."""
        return {
            index: self._slots.pin(key)
            for index, key in enumerate(keys)
            if self._slots.is_findable(key)
        }

    def begin_hold(
        self, keys: Sequence[bytes], indices: Iterable[int]
    ) -> tuple[dict[int, int], frozenset[int]]:
        """Hold slots of snapshots, by index, and say which are to be written. Those without room are left out.

        The last ones count most: they come first.
        """
        held = {}
        missing = []
        for index in sorted(indices, reverse=True):
            if self._slots.is_findable(keys[index]):
                held[index] = self._slots.pin(keys[index])
            else:
                missing.append((index, keys[index]))
        begun = {index: self._slots.begin(key) for index, key in missing}
        new = {index: slot for index, slot in begun.items() if slot is not None}
        return held | new, frozenset(new)

    def end_hold(self, held: HeldPrefix, *, is_written: bool) -> None:
        """Unpin snapshots, or publish those that are written."""
        for index, slot in held.states.items():
            if index not in held.new_states:
                self._slots.unpin(slot)
            elif is_written:
                self._slots.publish(held.keys[index])
            else:
                self._slots.discard(held.keys[index])

    def check_integrity(
        self, requests: Iterable[Request], others: Iterable[HeldPrefix] = ()
    ) -> None:
        """Assert that exactly the admitted ones among these requests have states, and that no slot is lost.

        others: what is held besides.
        """
        admitted = {request.id for request in requests if request.is_admitted}
        assert self._held.keys() == admitted, "a state is missing or was not released"
        pinned = [held.pinned for held in self._held.values() if held.pinned is not None]
        for other in others:
            pinned += [slot for at, slot in other.states.items() if at not in other.new_states]
        used = [slot for held in self._held.values() for slot in (held.slot, *held.draft_slots)]
        self._slots.check_integrity(used, pinned)

    def _give_back(self, held: HeldState) -> None:
        self._slots.give_back(held.draft_slots)
        held.draft_slots = []

    def _unpin(self, held: HeldState) -> None:
        if held.pinned is not None:
            self._slots.unpin(held.pinned)
            held.pinned = None
