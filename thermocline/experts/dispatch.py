"""Turns routing into work per expert, split by tier. Pure; the work is O(unique experts)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import ExpertBatch, ExpertIndex, ExpertKey, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.messages import LayerIndex, Routing


def dispatch(
    layer: LayerIndex, routing: Routing, hot_mask: NDArray[np.bool_]
) -> Mapping[Tier, tuple[ExpertBatch, ...]]:
    """Return each tier's batches, one per expert that any token chose, ascending by expert.

    hot_mask: bool [E]. A tier without work has no entry. Rows ascend within a batch.
    """
    if len(routing.expert_ids) == 1:
        return _dispatch_one(layer, routing, hot_mask)
    num_tokens, num_used = routing.expert_ids.shape
    flat = routing.expert_ids.reshape(-1)
    order = np.argsort(flat, kind="stable")  # pairs (token, slot) grouped by expert
    experts, starts = np.unique(flat[order], return_index=True)
    bounds = np.append(starts, num_tokens * num_used)
    weights = routing.weights.reshape(-1)
    batches: dict[Tier, list[ExpertBatch]] = {}
    for index, expert in enumerate(experts.tolist()):
        pairs = order[bounds[index] : bounds[index + 1]]
        batch = ExpertBatch(
            ExpertKey(layer, ExpertIndex(expert)),
            rows=(pairs // num_used).astype(np.int32),
            slots=(pairs % num_used).astype(np.int32),
            weights=weights[pairs],
        )
        batches.setdefault(Tier.HOT if hot_mask[expert] else Tier.COLD, []).append(batch)
    return MappingProxyType({tier: tuple(found) for tier, found in batches.items()})


def _dispatch_one(
    layer: LayerIndex, routing: Routing, hot_mask: NDArray[np.bool_]
) -> Mapping[Tier, tuple[ExpertBatch, ...]]:
    """Return the batches of a single token: the same, without sorting arrays."""
    experts = routing.expert_ids[0].tolist()
    weights = routing.weights[0]
    rows = np.zeros(1, np.int32)
    slots = np.arange(len(experts), dtype=np.int32)
    batches: dict[Tier, list[ExpertBatch]] = {}
    for slot in sorted(range(len(experts)), key=experts.__getitem__):
        expert = experts[slot]
        batch = ExpertBatch(
            ExpertKey(layer, ExpertIndex(expert)),
            rows,
            slots[slot : slot + 1],
            weights[slot : slot + 1],
        )
        batches.setdefault(Tier.HOT if hot_mask[expert] else Tier.COLD, []).append(batch)
    return MappingProxyType({tier: tuple(found) for tier, found in batches.items()})
