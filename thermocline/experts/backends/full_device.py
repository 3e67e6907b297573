"""A device that may hold all experts of all layers: holds them in place while a chunk is computed on it alone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from thermocline.errors import DeviceMemoryError
from thermocline.experts.cache.residency import StackedResidency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.experts.cache.store import ExpertStore
    from thermocline.kernels.gpu.resident import ResidentExperts
    from thermocline.messages import LayerIndex, Routing


class FullDevice:
    """A device's store, and what computes layers whose experts are all resident."""

    def __init__(self, store: ExpertStore, resident: ResidentExperts) -> None:
        self._store = store
        self._resident = resident
        self._residency = StackedResidency()

    @property
    def is_full(self) -> bool:
        """Whether all experts are resident now."""
        return self._store.is_full

    @contextmanager
    def held(self) -> Iterator[ResidentExperts]:
        """Hold all experts in place. Entering raises DeviceMemoryError where some were just evicted."""
        rows = self._store.hold_all()
        if rows is None:
            raise DeviceMemoryError("all experts any more: some were evicted between two steps")
        try:
            yield self._resident.at(self._residency.of(rows))
        finally:
            self._store.let_go()

    def count(self, layer: LayerIndex, routing: Routing) -> None:
        """Count what a layer chose: all of it was here."""
        self._store.count_hits(routing.expert_ids.size)


class NoExperts:
    """`FullDevice` of a model without routed experts: nothing is missing, and nothing has to be held."""

    is_full = True

    def __init__(self, resident: ResidentExperts) -> None:
        """resident: of no layer."""
        self._resident = resident

    @contextmanager
    def held(self) -> Iterator[ResidentExperts]:
        """See `FullDevice.held`."""
        yield self._resident

    def count(self, layer: LayerIndex, routing: Routing) -> None:
        """Count nothing: no layer routes."""
