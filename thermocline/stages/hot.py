"""The hot branch: experts of tier hot, computed on the hot tier's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.messages import Tier

if TYPE_CHECKING:
    from thermocline.experts.compute import ExpertCompute
    from thermocline.messages import LayerWork, TierResult


class HotStage:
    """LayerWork with hot experts -> their PartialSum, or the LayerSum."""

    def __init__(self, compute: ExpertCompute) -> None:
        self._compute = compute

    async def __call__(self, work: LayerWork) -> TierResult:
        """Compute this tier's share of the layer."""
        return await self._compute.compute_share(work, work.shares[Tier.HOT])
