"""The way that took least is used, and others are tried now and then."""

from __future__ import annotations

from collections import Counter

from thermocline.remote.receiving import Way, WayChoice


def waits(choice, times, number):
    """Wait so often, each way taking its time; return how often each was used."""
    used = Counter()
    for _ in range(number):
        way = choice.choose()
        used[way] += 1
        choice.add(way, times[way])
    return used


def test_each_way_is_tried_and_the_best_is_used():
    """Of 323 waits the first three try all ways, and ten others than the best."""
    choice = WayChoice()
    used = waits(choice, {Way.SPIN: 25e-6, Way.SLEEP: 70e-6, Way.LEAVE: 120e-6}, 323)
    assert used == {Way.SPIN: 311, Way.SLEEP: 6, Way.LEAVE: 6}


def test_what_becomes_better_is_found():
    """When the machine becomes busy, another way is the best after some tries; and back."""
    choice = WayChoice()
    idle = {Way.SPIN: 25e-6, Way.SLEEP: 70e-6, Way.LEAVE: 120e-6}
    busy = {Way.SPIN: 100e-6, Way.SLEEP: 70e-6, Way.LEAVE: 47e-6}
    waits(choice, idle, 100)
    waits(choice, busy, 2000)
    assert waits(choice, busy, 320)[Way.LEAVE] == 310
    waits(choice, idle, 2000)
    assert waits(choice, idle, 320)[Way.SPIN] == 310


def test_a_single_long_wait_changes_little():
    """A thread that was kept from running for a second says nothing of its way."""
    choice = WayChoice()
    times = {Way.SPIN: 25e-6, Way.SLEEP: 70e-6, Way.LEAVE: 120e-6}
    waits(choice, times, 10)
    choice.add(Way.SPIN, 1.0)
    assert choice.choose() is Way.SPIN
