"""Which tier computes which of a layer's chosen experts: by a fixed placement, or by what is on a device now.

Asked by the router for every layer of every chunk. Knows no stage, and nothing of how either tier computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from thermocline.experts.dispatch import dispatch, group, split
from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from thermocline.experts.placement import Placement
    from thermocline.experts.store import ExpertStore
    from thermocline.messages import IntArray, Lease, Routing, Tier, TierWork

Shares: TypeAlias = "Mapping[Tier, TierWork]"
Choice: TypeAlias = "tuple[NDArray[np.bool_], NDArray[np.bool_]]"
"""Which of a layer's experts the device computes, bool [n] each: of those there, and of the others."""


class Tiers(Protocol):
    """Gives each tier its share. Called from the lane that routes."""

    def dispatch(self, layer: LayerIndex, routing: Routing) -> tuple[Shares, Lease | None]:
        """Return each tier's share of a layer, and the lease of the hot one where it needs one."""
        ...

    def observe(self, layer: LayerIndex, routing: Routing) -> None:
        """Take note of a layer that the CPU computed whole, without a dispatch."""
        ...


class FixedTiers:
    """`Tiers` of a placement that never changes."""

    def __init__(self, placement: Placement) -> None:
        self._masks = [placement.hot_mask(LayerIndex(n)) for n in range(len(placement.hot))]

    def dispatch(self, layer: LayerIndex, routing: Routing) -> tuple[Shares, Lease | None]:
        """See `Tiers.dispatch`."""
        return dispatch(routing, self._masks[layer]), None

    def observe(self, layer: LayerIndex, routing: Routing) -> None:
        """See `Tiers.observe`."""


class DeviceTiers:
    """`Tiers` of what is on a device now.

    choose: told the layer, which of its chosen experts are there, and how many tokens chose each, returns
    which of them the device computes. last_layer: the last one with routed experts.
    """

    def __init__(
        self,
        store: ExpertStore,
        choose: Callable[[LayerIndex, NDArray[np.bool_], IntArray], Choice],
        last_layer: LayerIndex,
    ) -> None:
        self._store = store
        self._choose = choose
        self._last_layer = last_layer

    def dispatch(self, layer: LayerIndex, routing: Routing) -> tuple[Shares, Lease | None]:
        """See `Tiers.dispatch`."""
        self.observe(layer, routing)
        slots = self._store.residency(layer)
        groups = group(routing, len(slots))
        experts, counts = groups.experts, groups.counts
        hits, uploads = self._choose(layer, slots[experts] >= 0, counts)
        hot, lease = self._store.lease(layer, experts, counts, hits, uploads)
        return split(routing, groups, hot), lease

    def observe(self, layer: LayerIndex, routing: Routing) -> None:
        """See `Tiers.observe`."""
        self._store.observe(layer, routing, is_step_end=layer == self._last_layer)


def whatever_is_there(layer: LayerIndex, there: NDArray[np.bool_], counts: IntArray) -> Choice:
    """Let the device compute what it has, and copy nothing."""
    return there, np.zeros_like(there)
