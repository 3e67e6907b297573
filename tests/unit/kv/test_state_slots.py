"""Slots of recurrent state: those of sequences, and snapshots, which newer ones evict unless they are pinned."""

from __future__ import annotations

import pytest

from thermocline.kv.state_slots import StateSlots


def written(slots, *keys):
    """Take snapshots under these keys, one after another; return their slots."""
    taken = []
    for key in keys:
        taken.append(slots.begin(key))
        slots.publish(key)
    return taken


def test_sequences_have_slots_of_their_own():
    """Low slots come first and are used again; none is had twice."""
    slots = StateSlots(3, 0)
    assert [slots.acquire() for _ in range(3)] == [0, 1, 2]
    slots.release(1)
    assert slots.acquire() == 1
    slots.check_integrity([0, 1, 2], [])
    slots.release(2)
    with pytest.raises(AssertionError, match="is free"):
        slots.release(2)


def test_a_snapshot_is_found_when_it_is_written():
    """Not before; and nobody begins the same one twice."""
    slots = StateSlots(1, 2)
    slot = slots.begin(b"a")
    assert slot == 1
    assert not slots.is_findable(b"a")
    assert slots.begin(b"a") is None
    slots.publish(b"a")
    assert slots.is_findable(b"a")
    assert slots.begin(b"a") is None
    slots.check_integrity([], [])


def test_the_least_recently_used_snapshot_is_evicted():
    """Finding one makes it recent."""
    slots = StateSlots(0, 2)
    written(slots, b"a", b"b")
    slots.unpin(slots.pin(b"a"))
    written(slots, b"c")
    assert [slots.is_findable(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    slots.check_integrity([], [])


def test_a_pinned_snapshot_stays():
    """With all of them pinned, or being written, there is no room for another."""
    slots = StateSlots(0, 2)
    written(slots, b"a")
    slot = slots.pin(b"a")
    assert slots.begin(b"b") is not None
    assert slots.begin(b"c") is None
    slots.check_integrity([], [slot])
    slots.unpin(slot)
    assert slots.begin(b"c") == slot
    assert not slots.is_findable(b"a")


def test_a_discarded_snapshot_leaves_its_slot():
    """What was never finished is not found, and its slot is used again."""
    slots = StateSlots(0, 1)
    first = slots.begin(b"a")
    slots.discard(b"a")
    assert not slots.is_findable(b"a")
    assert slots.begin(b"b") == first


def test_without_snapshots_there_are_none():
    """A pool of sequences' slots alone shares nothing."""
    assert StateSlots(2, 0).begin(b"a") is None


def test_integrity_notices_what_is_lost():
    """A slot that nobody names, and a pin that nobody has, are faults of ours."""
    slots = StateSlots(2, 1)
    slots.acquire()
    with pytest.raises(AssertionError, match="lost"):
        slots.check_integrity([], [])
    written(slots, b"a")
    slots.pin(b"a")
    with pytest.raises(AssertionError, match="pins"):
        slots.check_integrity([0], [])
    assert repr(slots) == "StateSlots(1 sequences, 1 snapshots)"


def test_drafts_borrow_what_no_sequence_needs():
    """However many are borrowed, each sequence to come finds its slot; any slot may be a sequence's afterwards."""
    slots = StateSlots(2, 1, 3)
    mine = slots.acquire()
    borrowed = slots.borrow(9)
    assert len(borrowed) == 3
    assert slots.num_free == 1
    assert slots.borrow(1) == []
    other = slots.acquire()
    assert slots.num_free == 0
    assert len({mine, other, *borrowed}) == 5
    slots.check_integrity([mine, other, *borrowed], [])
    mine, borrowed[1] = borrowed[1], mine
    slots.give_back(borrowed)
    slots.check_integrity([mine, other], [])
    slots.release(mine)
    slots.release(other)
    assert slots.num_free == 2
    assert slots.begin(b"a") == 2  # a snapshot's slot is nobody else's
