"""`ExpertDispatcher` of one rank: its tokens' experts are exchanged, or all computed here, as rank 0 decided for the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.experts.dispatch.dispatcher import StaticDispatcher

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.experts.dispatch.dispatcher import Dispatches
    from thermocline.experts.placement.placement import Placement
    from thermocline.messages import Chunk, LayerIndex, Lease, Routing
    from thermocline.parallel.rank import RankMember


class RankDispatcher:
    """Gives every pair of a layer to the exchange, or every one to the CPU."""

    def __init__(self, member: RankMember, placement: Placement) -> None:
        self._member = member
        everywhere = np.ones((len(placement.hot), placement.num_experts), np.bool_)
        self._exchanged = StaticDispatcher(placement, everywhere)
        self._alone = StaticDispatcher(placement)

    def is_left_to_cpu(self, num_tokens: int) -> bool:
        return False

    def dispatch(
        self, chunk: Chunk, layer: LayerIndex, routing: Routing
    ) -> tuple[Dispatches, Lease | None]:
        is_alone = self._member.computes_alone(chunk.id)
        return (self._alone if is_alone else self._exchanged).dispatch(chunk, layer, routing)

    def computed_here(self, chunk: Chunk, layer: LayerIndex) -> None:
        pass

    def step_computed_here(self, chunk: Chunk, ended_ns: NDArray[np.int64]) -> None:
        pass
