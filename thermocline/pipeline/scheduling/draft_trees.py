"""Gives the nodes of a drafted tree rows of a step: branches, their blocks and states, and what is copied between them.

Pure. Owns nothing: blocks and states are `RequestBlocks`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from thermocline.messages import StateUse
from thermocline.pipeline.scheduling.branches import cut_branches, parents_among, without
from thermocline.pipeline.scheduling.forks import slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import IntArray
    from thermocline.pipeline.scheduling.batching import Run
    from thermocline.pipeline.scheduling.branches import Branch, Branches
    from thermocline.pipeline.scheduling.forks import Fork
    from thermocline.pipeline.scheduling.request import Request
    from thermocline.pipeline.scheduling.request_blocks import RequestBlocks
    from thermocline.speculation.contract import Draft


class TreeRun(NamedTuple):
    """A tree's rows in a step. forks: by branch, its blocks; None for the first, which has the request's own.

    states: by branch, its use of recurrent state; () where no layer is recurrent. num_states: slots that were borrowed.
    """

    shape: Branches
    forks: tuple[Fork | None, ...]
    states: tuple[StateUse, ...]
    num_states: int

    def fork_of(self, row: int) -> Fork | None:
        """Return the blocks of the branch with a row."""
        return self.forks[self.shape.branch_of(row)]

    def kept_state(self, row: int) -> int:
        """Return the number of the borrowed slot with the state after a row; `num_states` for the request's own."""
        own = self.shape.branches[0].length - 1
        if row == own:
            return self.num_states
        return row if row < own else row - 1

    def tables(self, own: IntArray, own_window: IntArray | None) -> list[tuple[IntArray, IntArray]]:
        """Return each branch's tables: of layers that keep all tokens, and of those with a window.

        own, own_window: the request's.
        """
        found = []
        for fork in self.forks:
            if fork is None:
                found.append((own, own if own_window is None else own_window))
            else:
                window = fork.table if fork.window_table is None else fork.window_table
                found.append((fork.table, window))
        return found


def copies_of(
    run: TreeRun, tables: Sequence[IntArray], base: int, block_tokens: int
) -> list[tuple[int, int]]:
    """Return slots whose keys and values branches need in blocks of their own, and where.

    tables: by branch. base: the position of row 0.
    """
    shape, depths, found = run.shape, run.shape.depths, []
    for number, (branch, fork) in enumerate(zip(shape.branches, run.forks, strict=True)):
        if fork is None:
            continue
        first = fork.first * block_tokens
        row, rows = branch.parent, {}
        while row > 0:
            rows[base + depths[row]] = row
            row = shape.parents[row]
        for position in range(first, base + branch.depth):
            of = tables[0]
            if position > base:
                of = tables[shape.branch_of(rows[position])]
            source = slot_of(of, position, block_tokens)
            found.append((source, slot_of(tables[number], position, block_tokens)))
    return found


class DraftTrees:
    """Finds room for trees."""

    def __init__(self, blocks: RequestBlocks) -> None:
        self._blocks = blocks

    def __repr__(self) -> str:
        return f"DraftTrees({self._blocks})"

    def extend(
        self, run: Run, draft: Draft, max_rows: int, max_depth: int, spare_blocks: int
    ) -> Run:
        """Return a decode run with a tree's nodes behind it, as far as there is room: see `RequestDrafts.extend`."""
        request = run.request
        nodes = _near_nodes(draft.parents, max_rows, max_depth)
        if request.options.wants_routing:  # what is told of routing is a chain
            first = cut_branches(parents_among(draft.parents, nodes))
            nodes = sorted(nodes[node] for node in first.nodes[: first.branches[0].length - 1])
        # The first branch gets the blocks that a chain would get. Behind these is no place for others, either.
        wanted = cut_branches(parents_among(draft.parents, nodes)).branches[0].length - 1
        room = self._blocks.draft_room(request, run.end, wanted, spare_blocks)
        nodes = _near_nodes(draft.parents, max_rows, min(room, max_depth), among=nodes)
        saved: list[int] = []
        if run.state is not None and nodes:
            saved = self._blocks.draft_states(request, len(nodes))
            nodes = nodes[: len(saved)]
        if not nodes:
            return run
        nodes, forks = self._with_room(run, draft.parents, nodes, spare_blocks)
        shape = cut_branches(parents_among(draft.parents, nodes))
        states = () if run.state is None else _states(shape, run.state, saved)
        tree = TreeRun(shape, tuple(forks), states, len(saved))
        tokens = tuple(draft.tokens[nodes[node]] for node in shape.nodes)
        return run._replace(
            num_logits=1 + len(tokens),
            state=states[0] if states else run.state,
            drafted=tokens,
            tree=tree,
        )

    def _with_room(
        self, run: Run, parents: Sequence[int], nodes: list[int], spare_blocks: int
    ) -> tuple[list[int], list[Fork | None]]:
        """Return the nodes for which there are blocks, and the blocks of their branches.

        Whole branches are left out, so those that stay are the branches of what stays.
        """
        among = parents_among(parents, nodes)
        shape = cut_branches(among)
        keeps = [True] * len(nodes)
        forks: dict[int, Fork | None] = {0: None}
        for number, branch in enumerate(shape.branches[1:], 1):
            before = shape.branch_of(branch.parent)
            fork = None
            if before in forks:
                fork = self._fork(run.request, forks[before], branch, run.start, spare_blocks)
            if fork is not None:
                forks[number] = fork
                continue
            for row in range(branch.first_row, branch.first_row + branch.length):
                keeps[shape.nodes[row - 1]] = False
        return [nodes[node] for node in without(among, keeps)], list(forks.values())

    def _fork(
        self, request: Request, below: Fork | None, branch: Branch, base: int, spare_blocks: int
    ) -> Fork | None:
        size = self._blocks.block_tokens
        first, last = base + branch.depth, base + branch.depth + branch.length - 1
        places = range(first // size, last // size + 1)
        return self._blocks.fork(request, below, places, spare_blocks)


def _near_nodes(
    parents: Sequence[int], max_nodes: int, max_depth: int, among: Sequence[int] | None = None
) -> list[int]:
    """Return the first nodes of a tree, at most so many, and none deeper than that. among: those that count; None for all."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    found = range(len(parents)) if among is None else among
    return [node for node in found if depths[node] <= max_depth][:max_nodes]


def _states(shape: Branches, own: StateUse, saved: Sequence[int]) -> tuple[StateUse, ...]:
    """Return each branch's use of recurrent state. own: of the request's own branch, without what it saves.

    saved: slots for the state after each row but the first branch's last, whose state the request's own slot has.
    """
    last = shape.branches[0].length - 1

    def slot_after(row: int) -> int:
        return own.slot if row == last else saved[row if row < last else row - 1]

    found = [own._replace(saves=tuple((row + 1, slot_after(row)) for row in range(last)))]
    for branch in shape.branches[1:]:
        end = branch.first_row + branch.length - 1
        saves = tuple(
            (row - branch.first_row + 1, slot_after(row)) for row in range(branch.first_row, end)
        )
        found.append(StateUse(slot_after(end), slot_after(branch.parent), saves))
    return tuple(found)
