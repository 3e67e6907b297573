"""What memory lacks of the experts that steps choose, against a memory that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.costmodel.disk_costs import absent_shares


def used_last(chosen, room, num_steps, again=0.0):
    """Return the share of choices that a memory of `room` experts misses, after as many steps to fill it.

    again: how often a step does with an expert what the step before did, instead of choosing anew.
    """
    draw = np.random.default_rng(0)
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    missed = total = 0
    choices = [np.zeros(len(chances), np.bool_) for chances in chosen]
    for step in range(2 * num_steps):
        for layer, chances in enumerate(chosen):
            anew = draw.random(len(chances)) < chances
            stays = draw.random(len(chances)) < again
            choices[layer] = np.where(stays, choices[layer], anew)
            for expert in np.flatnonzero(choices[layer]).tolist():
                if step >= num_steps:
                    missed, total = missed + ((layer, expert) not in held), total + 1
                held[layer, expert] = None
                held.move_to_end((layer, expert))
                if len(held) > room:
                    held.popitem(last=False)
    return missed / total


@pytest.mark.parametrize("room", [4, 16, 40, 60])
@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("again", [0.0, 0.4])
def test_a_memory_that_forgets_the_oldest_misses_as_much(room, exponent, again):
    """Four layers of 16 experts, chosen alike or by rank, by itself or as before: the formula and the memory agree."""
    weights = np.arange(1, 17) ** -exponent
    chosen = [np.minimum(2 * weights / weights.sum(), 1.0).tolist()] * 4
    found = absent_shares(chosen, [10] * 4, 10.0 * room, again=[again] * 4)
    assert found[0] == pytest.approx(used_last(chosen, room, 1500, again), abs=0.03)
    assert len(set(found)) == 1


def test_without_heat_all_sizes_miss_alike():
    """All experts alike: room for half of the bytes is what the last 2.4 steps chose, of which 1.9 count."""
    found = absent_shares([[0.25] * 8, [0.25] * 8], [10, 30], 160.0)
    assert found == pytest.approx((0.75**1.909, 0.75**1.909), abs=1e-3)


def test_layers_without_experts_lack_nothing():
    """Nor does one whose experts nobody chose; room for all leaves nothing to be read."""
    assert absent_shares([[], [0.0, 0.0]], [0, 10], 0.0) == (0.0, 0.0)
    assert absent_shares([[0.5, 1.0]], [10], 20.0) == pytest.approx((0.0,), abs=1e-9)
    assert absent_shares([[0.5, 1.0]], [10], 0.0) == pytest.approx((1.0,), abs=1e-4)


@pytest.mark.parametrize("steps", [0, 1, 3, 8, 200])
def test_a_prompt_leaves_any_experts_behind(steps):
    """A memory that a prompt went through misses as its share says, and learns step by step what is chosen."""
    weights = np.arange(1, 33) ** -1.2
    chosen = [np.minimum(2 * weights / weights.sum(), 1.0)] * 4
    draw, missed, total = np.random.default_rng(0), 0, 0
    for _ in range(400):
        ranks = draw.permutation(4 * 32)  # as the prompt used them
        held = OrderedDict(((rank // 32, rank % 32), None) for rank in ranks[:64].tolist())
        for step in range(steps + 1 if steps < 100 else 40):
            for layer, chances in enumerate(chosen):
                for expert in np.flatnonzero(draw.random(32) < chances).tolist():
                    if step == min(steps, 39):
                        missed, total = missed + ((layer, expert) not in held), total + 1
                    held[layer, expert] = None
                    held.move_to_end((layer, expert))
                    if len(held) > 64:
                        held.popitem(last=False)
    found = absent_shares([layer.tolist() for layer in chosen], [10] * 4, 640.0, steps)
    assert found[0] == pytest.approx(missed / total, abs=0.03)


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), min_size=1, max_size=4),
    st.floats(0, 40),
    st.floats(0, 40),
)
def test_more_room_never_misses_more(chosen, room, more):
    """Shares are within 0 and 1, and fall with the room, in every layer."""
    sizes = [1] * len(chosen)
    small, large = (absent_shares(chosen, sizes, space) for space in (room, room + more))
    assert all(0 <= b <= a + 1e-9 <= 1 + 2e-9 for a, b in zip(small, large, strict=True))
