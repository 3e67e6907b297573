"""Adds each token's expert outputs, in slot order, to the residual stream, unless one tier did so itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import Hidden, LayerIndex, LayerSum, PartialSum
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.kernels.lane import LaneThread
    from thermocline.messages import FloatArray, Joined


class CombineStage:
    """Joined partial sums -> Hidden before the next layer."""

    def __init__(self, lane: LaneThread) -> None:
        self._lane = lane

    async def __call__(self, joined: Joined) -> Hidden:
        """Add up one chunk's layer."""
        work = joined.work
        match joined.results:
            case (LayerSum(x=x),):
                return Hidden(work.chunk, LayerIndex(work.layer + 1), x)
            case _:
                pass
        args = {"layer": work.layer, "chunk": work.chunk.id, "tokens": work.chunk.num_tokens}
        x = await self._lane.run(Name.COMBINE, partial(combine, joined), args)
        return Hidden(work.chunk, LayerIndex(work.layer + 1), x)


def combine(joined: Joined) -> FloatArray:
    """Return residual + ((slot 0 + slot 1) + slot 2) + ...: float32 [T, D].

    The order is fixed by the slots alone, so tiers and their timing can not change a bit.
    """
    work = joined.work
    num_tokens, num_slots = work.routing.expert_ids.shape
    contributions = np.empty((num_slots, num_tokens, work.x.shape[1]), np.float32)
    for partial_sum in joined.results:
        assert isinstance(partial_sum, PartialSum), "a layer sum stands alone"
        contributions[partial_sum.slots, partial_sum.rows] = partial_sum.values
    total: FloatArray = contributions[0]
    for contribution in contributions[1:]:
        total += contribution
    total += work.residual
    return total
