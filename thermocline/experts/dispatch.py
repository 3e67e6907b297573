"""Turns routing into work per tier, its pairs grouped by expert. Pure."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import Tier, TierWork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.messages import IntArray, Routing


def dispatch(
    routing: Routing, hot_mask: NDArray[np.bool_], remote_mask: NDArray[np.bool_] | None = None
) -> Mapping[Tier, TierWork]:
    """Return each tier's share of a layer. A tier without work has no entry.

    hot_mask, remote_mask: bool [E], of at most 65,536 experts; what is in neither is cold.
    """
    chosen = routing.expert_ids.reshape(-1)
    if not len(chosen):  # a layer without routed experts
        return MappingProxyType({})
    # Pairs (token, slot) grouped by expert; NumPy sorts 16 bits in linear time.
    order = np.argsort(chosen.astype(np.uint16), kind="stable")
    if len(routing.expert_ids) == 1:  # no expert twice
        experts = chosen[order]
        counts = _ones(len(experts))
    else:
        all_counts = np.bincount(chosen, minlength=len(hot_mask))
        experts = np.flatnonzero(all_counts).astype(np.int32)
        counts = all_counts[experts].astype(np.int32)
    hot = hot_mask[experts]
    masks = {Tier.HOT: hot}
    if remote_mask is not None:
        masks[Tier.REMOTE] = remote_mask[experts]
        masks[Tier.COLD] = ~(hot | masks[Tier.REMOTE])
    else:
        masks[Tier.COLD] = ~hot
    shares = {}
    for tier, mine in masks.items():
        num_mine = int(np.count_nonzero(mine))
        if num_mine == len(experts):
            return MappingProxyType({tier: _share(routing, order, experts, counts)})
        if num_mine:
            pairs = order[np.repeat(mine, counts)]
            shares[tier] = _share(routing, pairs, experts[mine], counts[mine])
    return MappingProxyType(shares)


def _share(
    routing: Routing, pairs: NDArray[np.intp], experts: IntArray, counts: IntArray
) -> TierWork:
    """pairs: int [n], token * K + slot, grouped by `experts`."""
    num_used = routing.expert_ids.shape[1]
    flat = pairs.astype(np.int32)
    rows = flat // np.int32(num_used)
    slots = flat - rows * np.int32(num_used)
    return TierWork(experts, counts, rows, slots, routing.weights.reshape(-1)[pairs])


@cache
def _ones(length: int) -> IntArray:
    ones = np.ones(length, np.int32)
    ones.flags.writeable = False
    return ones
