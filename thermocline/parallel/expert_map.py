"""Which ranks own which experts. Pure: a table and how it is made; knows no process and no traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thermocline.messages import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMap:
    """owner: int32 [layers, experts, replicas], the ranks that hold each expert; -1 pads."""

    owner: IntArray


def linear_map(num_layers: int, num_experts: int, num_ranks: int) -> ExpertMap:
    """Return the map that gives each rank a run of neighbouring experts, the same in every layer."""
    ranks = np.arange(num_experts, dtype=np.int64) * num_ranks // max(num_experts, 1)
    owner = np.broadcast_to(ranks.astype(np.int32)[None, :, None], (num_layers, num_experts, 1))
    return ExpertMap(np.ascontiguousarray(owner))
