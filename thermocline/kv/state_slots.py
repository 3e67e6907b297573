"""Owns which slots of recurrent state running sequences have, and which hold snapshots, by key.

A state can not be rolled back to an earlier token, so a computed prefix is shared only where a snapshot was
taken. Pure. Knows neither requests nor the states themselves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class StateSlots:
    """Slots [0, num_live) and the last `num_drafts` are for sequences, those between them for snapshots.

    A snapshot is first written, then findable. The least recently used one without a pin is evicted. A sequence holds one
    slot, and borrows more for the length of a step. Any of these may then be the one that it goes on with.
    """

    def __init__(self, num_live: int, num_snapshots: int, num_drafts: int = 0) -> None:
        end = num_live + num_snapshots
        self.num_slots = end + num_drafts
        self._num_live = num_live
        self._num_drafts = num_drafts
        self._num_borrowed: int = 0
        # A stack: low slots are used again first.
        self._free: list[int] = [
            *range(self.num_slots - 1, end - 1, -1),
            *range(num_live - 1, -1, -1),
        ]
        self._sequence_slots = sorted(self._free)
        self._free_snapshots = list(range(end - 1, num_live - 1, -1))
        self._written: dict[bytes, int] = {}
        self._found: OrderedDict[bytes, int] = OrderedDict()
        self._pins = Counter[int]()
        self.num_changes = 0
        """How often what is evicted next has changed, in order or number."""
        self.on_forget: Callable[[bytes, bool], None] | None = None
        """Told the key of each snapshot that is evicted, before its slot is written again; and that it was."""

    def __repr__(self) -> str:
        num_live = self._num_live - self.num_free
        return f"StateSlots({num_live} sequences, {len(self._found)} snapshots)"

    @property
    def num_live(self) -> int:
        """Slots for sequences, free or not."""
        return self._num_live

    @property
    def num_free(self) -> int:
        """Slots that more sequences can get."""
        num_for_drafts = self._num_drafts - self._num_borrowed
        return len(self._free) - num_for_drafts

    def acquire(self) -> int:
        """Return a slot for a sequence. The caller has asked whether one is free."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Take a sequence's slot back."""
        assert slot in self._sequence_slots, f"slot {slot} holds a snapshot"
        assert slot not in self._free, f"slot {slot} is free"
        self._free.append(slot)

    def borrow(self, count: int) -> list[int]:
        """Return at most `count` more slots for a sequence; those of sequences to come are never among them."""
        count = min(count, self._num_drafts - self._num_borrowed)
        self._num_borrowed += count
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        """Take borrowed slots back, or others in their place."""
        self._num_borrowed -= len(slots)
        assert self._num_borrowed >= 0, "more slots come back than were borrowed"
        for slot in reversed(slots):
            self.release(slot)

    def is_findable(self, key: bytes) -> bool:
        """Whether there is a snapshot with this key."""
        return key in self._found

    def next_evicted(self, count: int) -> list[tuple[bytes, int]]:
        """Return keys and slots of those snapshots that so many further ones would evict, the first one first."""
        wanted = max(0, count - len(self._free_snapshots))
        unpinned = (item for item in self._found.items() if not self._pins[item[1]])
        return list(islice(unpinned, wanted))

    def pin(self, key: bytes) -> int:
        """Return a findable snapshot's slot, which is not written until `unpin`."""
        slot = self._found[key]
        self._found.move_to_end(key)
        self.num_changes += 1
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        assert self._pins[slot], f"slot {slot} is not pinned"
        self._pins[slot] -= 1
        self.num_changes += 1

    def begin(self, key: bytes) -> int | None:
        """Return a slot to write a snapshot into; None if there is one with this key, or no room."""
        if key in self._found or key in self._written:
            return None
        if not self._free_snapshots:
            oldest = next((key for key, slot in self._found.items() if not self._pins[slot]), None)
            if oldest is None:
                return None
            self._free_snapshots.append(self._found.pop(oldest))
            if self.on_forget is not None:
                self.on_forget(oldest, True)
        slot = self._written[key] = self._free_snapshots.pop()
        self.num_changes += 1
        return slot

    def publish(self, key: bytes) -> None:
        """Make the snapshot with this key findable: it is written."""
        self._found[key] = self._written.pop(key)
        self.num_changes += 1

    def discard(self, key: bytes) -> None:
        """Free the slot of the snapshot with this key, which was never finished."""
        self._free_snapshots.append(self._written.pop(key))

    def check_integrity(self, live: Iterable[int], pinned: Iterable[int]) -> None:
        """Assert that these are all slots of sequences and all pins, and that no slot is lost or used twice."""
        assert sorted([*live, *self._free]) == self._sequence_slots, "a slot is lost"
        assert +self._pins == Counter(pinned), "pins disagree"
        snapshots = [*self._free_snapshots, *self._written.values(), *self._found.values()]
        last = self.num_slots - self._num_drafts
        assert sorted(snapshots) == list(range(self._num_live, last)), "a slot is lost"
