"""Which ranks hold each routed expert. Pure data; knows no load and no process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.units import ceil_div

if TYPE_CHECKING:
    from thermocline.messages import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMap:
    """owner: int32 [num_layers, num_experts, max_replicas], the ranks that hold an expert, -1 behind the last one."""

    owner: IntArray


def linear_map(num_layers: int, num_experts: int, num_ranks: int) -> ExpertMap:
    """Return the map in which each rank has equally many neighbouring experts; the last ranks may have fewer."""
    per_rank = ceil_div(num_experts, num_ranks)
    ranks = (np.arange(num_experts) // per_rank).astype(np.int32)
    return ExpertMap(np.tile(ranks[None, :, None], (num_layers, 1, 1)))
