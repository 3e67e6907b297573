"""Cuts a tree of drafted tokens into branches: chains of rows that a step computes like sequences of their own. Pure.

Knows no request and no cache block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Branch(NamedTuple):
    """Rows first_row..first_row+length of a step, each behind the one before it.

    parent: the row before the first one; -1 where that is known since an earlier step. depth: of the first row, counted
    from the newest known token. level: how many branches lie before it on the way.
    """

    first_row: int
    length: int
    parent: int
    depth: int
    level: int


class Branches(NamedTuple):
    """A tree in the order of its rows. Row 0 is the newest known token, and no node.

    nodes: of each further row its node in the draft. parents: of each row the row before it, -1 for row 0.
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    branches: tuple[Branch, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each row, how far it is from row 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def branch_of(self, row: int) -> int:
        """Return the number of the branch that has a row."""
        return next(
            number
            for number, branch in enumerate(self.branches)
            if branch.first_row <= row < branch.first_row + branch.length
        )


def cut_branches(parents: Sequence[int]) -> Branches:
    """Return the branches of a tree. parents: by node, -1 for the newest known token; parents come before children.

    The first child of a node goes on with its branch, others begin their own.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    nodes: list[int] = []
    rows_before, depths = [-1], [0]
    found: list[Branch] = []
    # Row 0, which is no node, begins the first branch; others begin with a node, behind a row.
    first_children = children.get(-1, [])
    waiting = [(first_children[:1], -1, 0), *(([node], 0, 1) for node in first_children[1:])]
    for begins, before, level in waiting:  # grows meanwhile
        first_row = 0 if before < 0 else len(rows_before)
        depth = 0 if before < 0 else depths[before] + 1
        row, goes_on = max(before, 0), begins
        while goes_on:
            (node,) = goes_on
            rows_before.append(row)
            depths.append(depths[row] + 1)
            nodes.append(node)
            row = len(nodes)
            goes_on, others = children.get(node, [])[:1], children.get(node, [])[1:]
            waiting += [([other], row, level + 1) for other in others]
        found.append(Branch(first_row, len(rows_before) - first_row, before, depth, level))
    return Branches(tuple(nodes), tuple(rows_before), tuple(found))


def without(parents: Sequence[int], keeps: Sequence[bool]) -> list[int]:
    """Return the nodes that stay, in order: those that `keeps` says, and whose parents stay."""
    stays: list[bool] = []
    for parent, keep in zip(parents, keeps, strict=True):
        stays.append(keep and (parent < 0 or stays[parent]))
    return [node for node, stay in enumerate(stays) if stay]


def parents_among(parents: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of some nodes, numbered among these. Each node's parent is one of them, or -1."""
    number = {-1: -1} | {node: index for index, node in enumerate(nodes)}
    return tuple(number[parents[node]] for node in nodes)
