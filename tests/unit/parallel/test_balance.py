"""Balanced placements: the published example, bounds that hold for any load, few moves, and the demo's routing."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from thermocline.errors import ConfigError
from thermocline.parallel.balance import (
    Balanced,
    RankLayout,
    balance,
    imbalance,
    num_moves,
)

# The example of EPLB's README, and what it prints.
EXAMPLE = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
EXAMPLE_PLACES = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)


def loads_of(*layers):
    return np.array(layers, np.float64)


def in_order(num_layers, num_experts, num_ranks):
    """Experts as a linear map has them."""
    row = np.arange(num_experts, dtype=np.int32).reshape(num_ranks, -1)
    return Balanced(np.tile(row, (num_layers, 1, 1)))


@st.composite
def cases(draw, num_layers=1):
    """Loads, and a layout that holds their experts."""
    num_nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_ranks, num_groups = num_nodes * per_node, draw(st.sampled_from([1, 2, 3, 6]))
    num_experts = num_groups * draw(st.integers(1, 4))
    fewest = -(-num_experts // num_ranks)
    num_slots = num_ranks * draw(st.integers(fewest, fewest + 2))
    # Whole numbers, so that sums are exact.
    load = arrays(np.float64, (num_layers, num_experts), elements=st.integers(0, 1000))
    return draw(load), RankLayout(num_slots, num_ranks, num_nodes, num_groups)


def test_published_example():
    """Twelve experts in four groups on two nodes of four ranks, with four copies more: as EPLB prints it."""
    found = balance(loads_of(*EXAMPLE), RankLayout(16, 8, num_nodes=2, num_groups=4))
    assert found.expert_at.reshape(2, 16).tolist() == [list(layer) for layer in EXAMPLE_PLACES]


def test_groups_that_nodes_do_not_divide_are_placed_one_by_one():
    """With three groups on two nodes, all experts are copied and packed as if there were one node."""
    loads = loads_of(EXAMPLE[0])
    found = balance(loads, RankLayout(16, 8, num_nodes=2, num_groups=3))
    assert np.array_equal(found.expert_at, balance(loads, RankLayout(16, 8)).expert_at)


def test_hand_computed_placement():
    """8 is copied twice (8, 4, then 4 against 3), and the copies and the rest fill three ranks of two."""
    found = balance(loads_of((8, 3, 2, 1)), RankLayout(6, 3))
    # Shares: 8/3 three times, as 4 > 3 after the first copy; then 3, 2, 1. Heaviest first: 3 to rank 0, copies of 8
    # to ranks 1, 2 and 1's and 2's lighter next: 8/3 to 1, 8/3 to 2, 8/3 to 1 (the first of equals), 2 to 2, 1 to 0.
    assert found.expert_at.tolist() == [[[1, 3], [0, 0], [0, 2]]]
    assert found.rank_loads(loads_of((8, 3, 2, 1))) == pytest.approx(
        np.array([[4, 16 / 3, 14 / 3]])
    )
    assert found.expert_map(4).owner.tolist() == [[[1, 2], [0, -1], [2, -1], [0, -1]]]


@given(cases())
@settings(max_examples=150)
def test_every_expert_has_a_place(case):
    """Each expert is placed, loads are shared out whole, and copies go where the load is."""
    loads, layout = case
    found = balance(loads, layout)
    copies = found.copies(loads.shape[1])
    assert copies.min() >= 1
    assert copies.sum() == layout.num_slots
    assert found.rank_loads(loads).sum() == pytest.approx(loads.sum())
    owner = found.expert_map(loads.shape[1]).owner[0]
    for expert, ranks in enumerate(owner.tolist()):
        held = {rank for rank, row in enumerate(found.expert_at[0]) if expert in row}
        assert [rank for rank in ranks if rank >= 0] == sorted(held)
    is_one_node = layout.num_groups % layout.num_nodes or layout.num_nodes == 1
    if loads.any() and is_one_node:
        # Taking a copy from one expert for another makes the largest share no smaller.
        shares = loads[0] / copies[0]
        spared = [
            loads[0][one] / (copies[0][one] - 1) for one in np.flatnonzero(copies[0] > 1).tolist()
        ]
        assert all(shares.max() <= each for each in spared)


@given(arrays(np.float64, 6, elements=st.integers(0, 50)))
@settings(max_examples=60)
def test_near_the_best_of_all_placements(load):
    """The most loaded of two ranks of three experts has at most 4/3 of what the best of all placements gives it."""
    found = balance(load[None], RankLayout(6, 2)).rank_loads(load[None]).max()
    best = min(max(sum(order[:3]), sum(order[3:])) for order in permutations(load.tolist()))
    assert found <= best * 4 / 3 + 1e-9


@given(cases(num_layers=2), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_unchanged_load_moves_nothing_and_changes_never_harm(case, seed):
    """The same load again keeps each slot; another load gives no layer a more loaded rank than keeping all would."""
    loads, layout = case
    first = balance(loads, layout)
    assert num_moves(first, balance(loads, layout, first)) == 0
    other = np.random.default_rng(seed).permuted(loads, axis=1)
    fresh, kept = balance(other, layout), balance(other, layout, first)
    assert (kept.rank_loads(other).max(axis=1) <= first.rank_loads(other).max(axis=1) + 1e-9).all()
    assert num_moves(first, kept) <= num_moves(first, fresh)
    changed = (kept.expert_at != first.expert_at).any(axis=(1, 2))
    assert np.allclose(
        kept.rank_loads(other).max(axis=1)[changed], fresh.rank_loads(other).max(axis=1)[changed]
    )


def test_slots_and_ranks_are_swapped_to_move_less():
    """Renaming ranks and slots of a placement needs no move; one expert that changes rank needs as few as can be."""
    before = Balanced(np.array([[[3, 2], [0, 1]]], np.int32))
    after = balance(loads_of((1, 9, 6, 3)), RankLayout(4, 2), before)
    # 9 with 1, and 6 with 3: as before, in the slots of before.
    assert num_moves(before, after) == 0
    # By itself, rank 0 would get 0, 3 and 4, and rank 1 the others.
    before = Balanced(np.array([[[1, 2, 0], [3, 4, 5]]], np.int32))
    after = balance(loads_of((10, 9, 8, 3, 2, 1)), RankLayout(6, 2), before)
    assert after.expert_at.tolist() == [[[1, 2, 5], [3, 4, 0]]]


def test_layers_without_load_are_placed_evenly():
    """A layer that nobody used gets no more copies of one expert than of another."""
    found = balance(np.zeros((1, 4)), RankLayout(8, 2))
    assert found.copies(4).tolist() == [[2, 2, 2, 2]]
    assert imbalance(found.rank_loads(np.zeros((1, 4)))).tolist() == [1.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RankLayout(7, 2), "can not be divided among 2 ranks"),
        (lambda: RankLayout(6, 3, num_nodes=2), "can not be divided among 2 nodes"),
        (lambda: RankLayout(0, 1), "1 or more"),
        (lambda: balance(np.ones((1, 5)), RankLayout(4, 2)), "do not hold 5 experts"),
        (lambda: balance(np.array([[1.0, np.nan]]), RankLayout(2, 2)), "0 or more"),
        (lambda: balance(np.array([[1.0, -1.0]]), RankLayout(2, 2)), "0 or more"),
        (
            lambda: balance(np.ones((2, 4)), RankLayout(4, 2), in_order(1, 4, 2)),
            "other layers",
        ),
        (
            lambda: balance(np.ones((1, 3)), RankLayout(4, 2), in_order(1, 4, 2)),
            "other layers",
        ),
    ],
)
def test_refusals(make, says):
    """What can not be placed is refused with the reason."""
    with pytest.raises(ConfigError, match=says):
        make()
