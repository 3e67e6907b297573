"""Hints the cold experts that were just selected, beside the compute that will read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.messages import PrefetchHint, Tier

if TYPE_CHECKING:
    from thermocline.messages import LayerWork
    from thermocline.prefetch.governor import PrefetchGovernor


class PrefetchStage:
    """LayerWork -> a hint to the governor; nothing flows on from here."""

    def __init__(self, governor: PrefetchGovernor) -> None:
        self._governor = governor

    async def __call__(self, work: LayerWork) -> None:
        """Offer the hint without waiting."""
        cold = work.shares.get(Tier.COLD)
        if cold is not None:
            self._governor.offer_nowait(PrefetchHint(work.layer, cold.experts))
