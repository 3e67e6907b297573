"""Counts how often each expert was chosen. Knows no placement; the router stage reports here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.messages import LayerIndex, Routing


class ExpertHeat:
    """Choices per (layer, expert) since the start."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = np.zeros((num_layers, num_experts), np.int64)

    def record(self, layer: LayerIndex, routing: Routing) -> None:
        """Count one chunk's choices of one layer."""
        if len(routing.expert_ids) == 1:  # no expert twice
            self._counts[layer, routing.expert_ids[0]] += 1
            return
        num_experts = self._counts.shape[1]
        self._counts[layer] += np.bincount(routing.expert_ids.reshape(-1), minlength=num_experts)

    def counts(self) -> NDArray[np.int64]:
        """Return a copy, int64 [layers, experts]."""
        return self._counts.copy()
