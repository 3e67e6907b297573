"""Memory for experts: slots of each layout that never overlap, spare ones for all, and a budget that is kept."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from itertools import pairwise

import pytest

from thermocline.errors import DeviceMemoryError
from thermocline.experts.backends.slot_memory import SlotMemory
from thermocline.experts.placement.slots import UNIT_BYTES, LayoutSlots, plan_slots


@pytest.mark.parametrize("seed", range(20))
def test_slots_never_overlap_and_come_back(seed):
    """Taken and given back at random: what is in use never overlaps and stays inside, and all of it can be had."""
    rng = random.Random(seed)
    layouts = {name: LayoutSlots(rng.randrange(1, 3000), rng.randrange(4)) for name in "abc"}
    memory = SlotMemory(layouts, num_spare=2)
    taken: dict[int, str] = {}
    for _ in range(200):
        if taken and rng.random() < 0.4:
            slot = rng.choice(list(taken))
            memory.free(taken.pop(slot), slot)
            continue
        name = rng.choice("abc")
        has_own = sum(of == name for of in taken.values()) < layouts[name].count
        with nullcontext() if has_own else suppress(DeviceMemoryError):
            taken[memory.allocate(name)] = name
        spans = sorted((slot * UNIT_BYTES, layouts[of].expert_bytes) for slot, of in taken.items())
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(spans))
        assert not spans or sum(spans[-1]) <= memory.total_bytes
    for slot, name in taken.items():
        memory.free(name, slot)
    again = {memory.allocate("a") for _ in range(layouts["a"].count + 2)}
    assert len(again) == layouts["a"].count + 2


def test_spare_slots_that_are_taken_for_good_are_nobody_elses():
    """They lie behind all others; no layout gets them any more."""
    memory = SlotMemory({"a": LayoutSlots(1000, 2)}, num_spare=3)
    taken = memory.take_spare(2)
    others = [memory.allocate("a") for _ in range(3)]
    assert len({*taken, *others}) == 5
    assert min(taken) > max(others[:2])
    with pytest.raises(DeviceMemoryError):
        memory.allocate("a")
    with pytest.raises(AssertionError, match="spare"):
        memory.take_spare(1)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_keeps_to_its_budget_and_wastes_less_than_an_expert_of_each_layout(seed):
    """First experts have room; beyond them, shares of the budget; no more slots than experts."""
    rng = random.Random(seed)
    sizes = {name: rng.randrange(300, 5000) for name in "abc"}
    numbers = {name: rng.randrange(1, 60) for name in "abc"}
    first = {name: rng.randrange(numbers[name] + 1) for name in "ab"}
    needed = sum(
        -(-sizes[name] // UNIT_BYTES) * UNIT_BYTES * count for name, count in first.items()
    )
    budget = needed + rng.randrange(200_000)
    slots = plan_slots(sizes, numbers, first, budget)
    memory = SlotMemory(slots, 0)
    assert memory.total_bytes <= budget
    for name, count in numbers.items():
        assert first.get(name, 0) <= slots[name].count <= count
    if not any(first.values()) and any(slots[name].count < numbers[name] for name in "abc"):
        assert budget - memory.total_bytes < sum(sizes.values()) + 3 * UNIT_BYTES


def test_no_budget_is_no_slots():
    """Spare slots alone; a layout with none of its own uses them."""
    slots = plan_slots({"a": 1000}, {"a": 9}, {}, 0)
    memory = SlotMemory(slots, num_spare=1)
    assert memory.resident_bytes == 0
    slot = memory.allocate("a")
    with pytest.raises(DeviceMemoryError, match="one more expert"):
        memory.allocate("a")
    memory.free("a", slot)
    assert memory.allocate("a") == slot


@pytest.mark.parametrize("seed", range(20))
def test_a_closed_segment_gives_out_nothing_and_reports_its_last_slot(seed):
    """Slots are taken, given back, closed and opened at random; whoever closes is told when all have come back."""
    rng = random.Random(seed)
    layouts = {"a": LayoutSlots(UNIT_BYTES, 2), "b": LayoutSlots(2 * UNIT_BYTES, 1)}
    segments = (("a", range(10, 14)), ("b", range(20, 26, 2)), ("a", range(30, 32)))
    memory = SlotMemory(layouts, 1, segments)
    told: list[int] = []
    memory.on_closed = lambda: told.append(memory.num_closing)
    is_open, taken = [True] * 3, {}
    for _ in range(300):
        action, segment = rng.random(), rng.randrange(3)
        inside = [slot for slot in taken if slot in segments[segment][1]]
        if action < 0.45:
            layout = rng.choice("ab")
            with suppress(DeviceMemoryError):
                slot = memory.allocate(layout)
                assert slot not in taken
                taken[slot] = layout
                holder = [n for n, (_, slots) in enumerate(segments) if slot in slots]
                assert all(is_open[n] and segments[n][0] == layout for n in holder)
        elif action < 0.8 and taken:
            slot = rng.choice(list(taken))
            memory.free(taken.pop(slot), slot)
        elif is_open[segment]:
            assert memory.close(segment) == segments[segment][1]
            is_open[segment] = False
        elif not inside:
            memory.open(segment)
            is_open[segment] = True
        left = [n for n in range(3) if not is_open[n] and any(s in taken for s in segments[n][1])]
        assert memory.num_closing == len(left)
        shares = {"a": 2, "b": 1}
        for (layout, slots), is_there in zip(segments, is_open, strict=True):
            shares[layout] += len(slots) * is_there
        assert memory.shares() == {
            name: count * layouts[name].expert_bytes for name, count in shares.items()
        }
    assert told


def test_the_last_segment_is_filled_first_after_all_other_slots():
    """The cache takes segments back from the front."""
    memory = SlotMemory(
        {"a": LayoutSlots(UNIT_BYTES, 1)}, 1, (("a", range(5, 7)), ("a", range(8, 9)))
    )
    assert [memory.allocate("a") for _ in range(5)] == [0, 8, 6, 5, 1]
    assert repr(memory) == "SlotMemory(1 layouts, 512 bytes, 2 of 2 segments, 0 slots free)"
