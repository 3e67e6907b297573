"""Who computes an expert: which of its owners, and who takes it over when they are lost. Pure.

Every rank maps the whole file, so a rank that is left can compute any expert. Experts of ranks that are left stay where
they are, since their pages are in memory there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.parallel.expert_map import ExpertMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import IntArray


def targets(experts: ExpertMap, place: int) -> IntArray:
    """Return to which rank `place` sends the tokens of each expert: int32 [layers, experts].

    To itself where it is an owner; else the owners of an expert share the senders.
    """
    owner = experts.owner
    counts = (owner >= 0).sum(axis=2)
    ids = np.arange(owner.shape[1])
    chosen = np.where(counts, (ids[None, :] + place) % np.maximum(counts, 1), 0)
    first = np.take_along_axis(owner, chosen[..., None], axis=2)[..., 0]
    found: IntArray = np.where((owner == place).any(axis=2), np.int32(place), first)
    return found.astype(np.int32)


def owned_counts(experts: ExpertMap, place: int) -> IntArray:
    """Return how many experts a rank owns, by layer: int32 [layers]."""
    counts: IntArray = (experts.owner == place).any(axis=2).sum(axis=1).astype(np.int32)
    return counts


def taken_over(experts: ExpertMap, left: Sequence[int]) -> ExpertMap:
    """Return the map of the ranks that are left, by their new places. left: their old places, ascending.

    Each expert without an owner goes to the rank that has the fewest of its layer, the first of equals.
    """
    new_place = np.full(int(experts.owner.max(initial=0)) + 2, -1, np.int32)
    new_place[list(left)] = np.arange(len(left), dtype=np.int32)
    owner = np.where(experts.owner >= 0, new_place[experts.owner], np.int32(-1))
    owner = -np.sort(-owner, axis=2)  # owners first
    for layer in owner:
        held = np.bincount(layer[layer >= 0], minlength=len(left))
        for expert in np.flatnonzero((layer < 0).all(axis=1)):
            taker = int(held.argmin())
            layer[expert, 0] = taker
            held[taker] += 1
    return ExpertMap(owner)
