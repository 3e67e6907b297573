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


def dispatch(routing: Routing, hot_mask: NDArray[np.bool_]) -> Mapping[Tier, TierWork]:
    """Return each tier's share of a layer. A tier without work has no entry.

    hot_mask: bool [E].
    """
    num_tokens, num_used = routing.expert_ids.shape
    chosen = routing.expert_ids.reshape(-1)
    order = np.argsort(chosen, kind="stable")  # pairs (token, slot) grouped by expert
    ordered = chosen[order]
    hot = hot_mask[ordered]
    num_hot = int(np.count_nonzero(hot))
    weights = routing.weights.reshape(-1)
    if num_used == 0:
        shares: dict[Tier, TierWork] = {}
    elif num_hot == 0:
        shares = {Tier.COLD: _share(order, ordered, weights, num_tokens, num_used)}
    elif num_hot == len(order):
        shares = {Tier.HOT: _share(order, ordered, weights, num_tokens, num_used)}
    else:
        shares = {
            tier: _share(order[mine], ordered[mine], weights, num_tokens, num_used)
            for tier, mine in ((Tier.HOT, hot), (Tier.COLD, ~hot))
        }
    return MappingProxyType(shares)


def _share(
    pairs: NDArray[np.intp],
    experts: IntArray,
    weights: NDArray[np.float32],
    num_tokens: int,
    num_used: int,
) -> TierWork:
    """pairs: int [n], token * num_used + slot, grouped by `experts` int32 [n]."""
    if num_tokens == 1:  # no expert twice
        ones, zeros = _ones_and_zeros(len(pairs))
        return TierWork(experts, ones, zeros, pairs.astype(np.int32), weights[pairs])
    first = np.flatnonzero(np.diff(experts, prepend=-1))
    counts = np.diff(first, append=len(experts)).astype(np.int32)
    rows, slots = np.divmod(pairs, num_used)
    return TierWork(
        experts[first], counts, rows.astype(np.int32), slots.astype(np.int32), weights[pairs]
    )


@cache
def _ones_and_zeros(length: int) -> tuple[IntArray, IntArray]:
    both = np.ones(length, np.int32), np.zeros(length, np.int32)
    for array in both:
        array.flags.writeable = False
    return both
