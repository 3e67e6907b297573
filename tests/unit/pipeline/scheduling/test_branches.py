"""Trees as branches: every node has one row, behind its parent's, and each branch is a chain."""

from __future__ import annotations

import random

import pytest

from thermocline.pipeline.scheduling.branches import (
    Branch,
    cut_branches,
    parents_among,
    without,
)


def test_a_chain_is_one_branch():
    """In its own order."""
    found = cut_branches((-1, 0, 1))
    assert found.nodes == (0, 1, 2)
    assert found.parents == (-1, 0, 1, 2)
    assert found.branches == (Branch(0, 4, -1, 0, 0),)
    assert found.depths == (0, 1, 2, 3)


def test_others_than_the_first_child_begin_branches():
    """Behind the branch that they leave."""
    found = cut_branches((-1, -1, 0, 1, 0))
    assert found.nodes == (0, 2, 1, 3, 4)
    assert found.branches == (
        Branch(0, 3, -1, 0, 0),
        Branch(3, 2, 0, 1, 1),
        Branch(5, 1, 1, 2, 1),
    )
    assert [found.branch_of(row) for row in range(6)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("seed", range(50))
def test_random_trees(seed):
    """Rows, depths and levels agree with the tree."""
    rng = random.Random(seed)
    parents = [rng.randint(max(-1, n - 4), n - 1) for n in range(rng.randint(1, 20))]
    found = cut_branches(parents)
    assert sorted(found.nodes) == list(range(len(parents)))
    row_of = {-1: 0} | {node: row for row, node in enumerate(found.nodes, 1)}
    for node, parent in enumerate(parents):
        assert found.parents[row_of[node]] == row_of[parent] < row_of[node]
    end = 0
    for number, branch in enumerate(found.branches):
        assert branch.first_row == end
        end += branch.length
        assert found.parents[branch.first_row] == branch.parent
        assert found.depths[branch.first_row] == branch.depth
        for row in range(branch.first_row + 1, end):
            assert found.parents[row] == row - 1
        if number:
            assert branch.level == found.branches[found.branch_of(branch.parent)].level + 1
    assert end == len(parents) + 1


def test_what_stays_of_a_tree():
    """A node goes with its parent, and those that stay are numbered anew."""
    parents = (-1, 0, 0, 1, 2, -1)
    kept = without(parents, (True, False, True, True, True, True))
    assert kept == [0, 2, 4, 5]
    assert parents_among(parents, kept) == (-1, 0, 1, -1)
