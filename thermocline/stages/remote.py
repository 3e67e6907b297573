"""The remote branch: experts that workers hold, in other processes or machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.messages import Tier

if TYPE_CHECKING:
    from thermocline.experts.compute import ExpertCompute
    from thermocline.messages import LayerWork, TierResult


class RemoteStage:
    """LayerWork with experts of workers -> their PartialSum, or the LayerSum."""

    def __init__(self, compute: ExpertCompute) -> None:
        self._compute = compute

    async def __call__(self, work: LayerWork) -> TierResult:
        """Have this tier's share of the layer computed."""
        return await self._compute.compute_share(work, work.shares[Tier.REMOTE])
