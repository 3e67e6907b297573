"""Places experts on ranks so that ranks get about the same load, with copies of the most used ones. Pure.

The algorithm is that of DeepSeek's EPLB, written from its description
(https://github.com/deepseek-ai/EPLB): groups of experts are packed onto nodes, each node copies its most loaded
experts, and a node's copies are packed onto its ranks. Where the groups can not be divided among the nodes, all ranks
are one node and all experts one group each. A copy gets an equal share of its expert's load.

Every layer is placed by itself, since its exchange waits for its own most loaded rank. Knows no file and no process
group; loads may be the warmth of `experts/heat.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ConfigError
from thermocline.parallel.expert_map import ExpertMap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.messages import IntArray

    Loads = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How many places for experts there are, and where.

    num_slots: copies of experts in each layer, over all ranks, equally many on each. num_nodes: machines, with
    neighbouring ranks each. num_groups: neighbouring experts that should stay on one node, as routers with groups
    choose among few of them.
    """

    num_slots: int
    num_ranks: int
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        if min(self.num_slots, self.num_ranks, self.num_nodes, self.num_groups) < 1:
            raise ConfigError("slots, ranks, nodes and groups of experts must be 1 or more")
        if self.num_slots % self.num_ranks:
            raise ConfigError(
                f"{self.num_slots} copies of experts can not be divided among {self.num_ranks} ranks: "
                "use a multiple"
            )
        if self.num_ranks % self.num_nodes:
            raise ConfigError(
                f"{self.num_ranks} ranks can not be divided among {self.num_nodes} nodes: use a multiple"
            )

    @property
    def slots_per_rank(self) -> int:
        """Experts that each rank holds of a layer."""
        return self.num_slots // self.num_ranks


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Placed experts. expert_at: int32 [layers, ranks, slots per rank], the expert in each slot."""

    expert_at: IntArray

    def copies(self, num_experts: int) -> IntArray:
        """Return how many copies each expert has, int32 [layers, experts]."""
        layers = self.expert_at.reshape(len(self.expert_at), -1)
        counts = [np.bincount(layer, minlength=num_experts) for layer in layers]
        return np.array(counts, np.int32)

    def rank_loads(self, loads: Loads) -> Loads:
        """Return what each rank gets of `loads` [layers, experts]: float64 [layers, ranks].

        Copies of one expert share its load equally, also those on one rank.
        """
        shares = loads / np.maximum(self.copies(loads.shape[1]), 1)
        layer = np.arange(len(loads))[:, None, None]
        sums: Loads = shares[layer, self.expert_at].sum(axis=2)
        return sums

    def expert_map(self, num_experts: int) -> ExpertMap:
        """Return the ranks of each expert, ascending, each rank once."""
        num_layers, num_ranks, _ = self.expert_at.shape
        held = np.zeros((num_layers, num_experts, num_ranks), bool)
        layer = np.arange(num_layers)[:, None, None]
        held[layer, self.expert_at, np.arange(num_ranks)[:, None]] = True
        width = int(held.sum(axis=2).max(initial=1))
        # Held ranks first, each in ascending order.
        order = np.argsort(~held, axis=2, kind="stable")[:, :, :width]
        owner = np.where(np.take_along_axis(held, order, axis=2), order, -1)
        return ExpertMap(owner.astype(np.int32))


def balance(loads: Loads, layout: RankLayout, before: Balanced | None = None) -> Balanced:
    """Place the experts of every layer. loads: float64 [layers, experts], 0 or more; layers of zeros count as even.

    before: what is placed now, of the same layout. A layer keeps it unless its most loaded rank would get less; and
    where it changes, ranks of a node swap what they would get, and ranks their slots, so that less is moved. Raises
    ConfigError where the layout has no place for each expert or the loads are no loads.
    """
    num_experts = loads.shape[1]
    if not num_experts <= layout.num_slots:
        raise ConfigError(
            f"{layout.num_slots} slots do not hold {num_experts} experts: use at least as many"
        )
    if not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ConfigError("the load of an expert must be 0 or more: count the routing again")
    if before is not None:
        shape = len(loads), layout.num_ranks, layout.slots_per_rank
        if before.expert_at.shape != shape or before.expert_at.max() >= num_experts:
            raise ConfigError(
                "what is placed now has other layers, experts, ranks or slots: balance without it"
            )
    even = np.ones(num_experts)
    rows = [_place(load if load.any() else even, layout) for load in loads.astype(np.float64)]
    fresh = Balanced(np.array(rows, np.int32))
    if before is None:
        return fresh
    is_better = fresh.rank_loads(loads).max(axis=1) < before.rank_loads(loads).max(axis=1)
    lacks = before.copies(num_experts).min(axis=1) == 0
    layers = [
        _keep(old, new, layout) if moves else old
        for old, new, moves in zip(
            before.expert_at, fresh.expert_at, is_better | lacks, strict=True
        )
    ]
    return Balanced(np.array(layers, np.int32))


def num_moves(before: Balanced, after: Balanced) -> int:
    """Return how many slots of `after` have another expert than in `before`: what ranks must load."""
    return int(np.count_nonzero(before.expert_at != after.expert_at))


def imbalance(rank_loads: Loads) -> Loads:
    """Return the most loaded rank's load as a multiple of the mean, float64 [layers]; 1 where nothing is loaded."""
    mean = rank_loads.mean(axis=1)
    most = rank_loads.max(axis=1)
    ratios: Loads = np.divide(most, mean, out=np.ones_like(mean), where=mean > 0)
    return ratios


def _place(load: Loads, layout: RankLayout) -> IntArray:
    """Return the experts of one layer, int32 [ranks, slots per rank]."""
    num_experts, num_nodes, num_groups = len(load), layout.num_nodes, layout.num_groups
    if num_groups % num_nodes or num_experts % num_groups:
        num_nodes = num_groups = 1
    group_size = num_experts // num_groups
    node_of_group = _pack(load.reshape(num_groups, group_size).sum(axis=1), num_nodes)
    ranks_per_node = layout.num_ranks // num_nodes
    rows = []
    for groups in node_of_group:
        experts = (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)
        copies, shares = _copy(load[experts], layout.num_slots // num_nodes)
        rows += [experts[copies[mine]] for mine in _pack(shares, ranks_per_node)]
    return np.array(rows, np.int32)


def _pack(weights: Loads, num_packs: int) -> IntArray:
    """Return the items of each pack, [packs, items per pack]: heaviest first into the lightest with room."""
    per_pack = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    if per_pack == 1:
        return np.arange(num_packs, dtype=np.int32)[:, None]
    totals = np.zeros(num_packs)
    for item in np.argsort(-weights, kind="stable").tolist():
        pack = int(np.argmin(totals))
        packs[pack].append(item)
        totals[pack] += weights[item]
        if len(packs[pack]) == per_pack:
            totals[pack] = np.inf
    return np.array(packs, np.int32)


def _copy(load: Loads, num_slots: int) -> tuple[IntArray, Loads]:
    """Return the expert of each copy, int32 [num_slots], and its share of the load; the most loaded is copied next."""
    copies = np.ones(len(load), np.int32)
    of_slot = list(range(len(load)))
    while len(of_slot) < num_slots:
        most = int(np.argmax(load / copies))
        copies[most] += 1
        of_slot.append(most)
    slots = np.array(of_slot, np.int32)
    return slots, (load / copies)[slots]


def _keep(before: IntArray, after: IntArray, layout: RankLayout) -> IntArray:
    """Return `after` [ranks, slots] with ranks of a node and slots of a rank swapped so that less differs."""
    kept = after.copy()
    per_node = layout.num_ranks // layout.num_nodes
    for first in range(0, layout.num_ranks, per_node):
        node = slice(first, first + per_node)
        kept[node] = _swap_ranks(before[node], after[node])
    for rank in range(len(kept)):
        kept[rank] = _swap_slots(before[rank], kept[rank])
    return kept


def _swap_ranks(before: IntArray, after: IntArray) -> IntArray:
    """Give each rank of a node the row that has most in common with its own, the best pairs first."""
    common = np.array([[_in_common(old, new) for new in after] for old in before])
    row_of = np.empty(len(after), np.int32)
    left = common.copy()
    for _ in range(len(after)):
        rank, row = np.unravel_index(int(np.argmax(left)), left.shape)
        row_of[rank] = row
        left[rank, :] = left[:, row] = -1
    # Taking the best pair first may lose more than it wins.
    ranks = np.arange(len(after))
    is_better = common[ranks, row_of].sum() > common[ranks, ranks].sum()
    return after[row_of] if is_better else after


def _in_common(first: IntArray, second: IntArray) -> int:
    """Return how many experts two ranks have in common, copies counted."""
    num = int(max(first.max(), second.max())) + 1
    counts = np.bincount(first, minlength=num), np.bincount(second, minlength=num)
    return int(np.minimum(*counts).sum())


def _swap_slots(before: IntArray, after: IntArray) -> IntArray:
    """Return the experts of `after` with those that the rank has already in their slots."""
    left = after.tolist()
    kept = np.full(len(after), -1, np.int32)
    for slot, expert in enumerate(before.tolist()):
        if expert in left:
            left.remove(expert)
            kept[slot] = expert
    kept[kept < 0] = left
    return kept
