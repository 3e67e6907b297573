"""Which experts were chosen for the chunks of which somebody wants to know. The router stage reports here,
the step loop takes. Knows no request.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thermocline.messages import Chunk, ChunkId, ExpertIds, LayerIndex, Routing


class RoutingLog:
    """Choices of chunks in flight, layer by layer."""

    def __init__(self) -> None:
        self._layers: defaultdict[ChunkId, dict[LayerIndex, ExpertIds]] = defaultdict(dict)

    def record(self, chunk: Chunk, layer: LayerIndex, routing: Routing) -> None:
        """Note one layer's choices; from the lane that routes."""
        if routing.expert_ids.shape[1]:  # not a dense layer
            self._layers[chunk.id][layer] = routing.expert_ids.astype(np.int16)

    def take(self, chunk: Chunk) -> ExpertIds:
        """Return a chunk's choices, int16 [T, layers, K], and forget them, after its last layer.

        Layers without experts are left out. Where layers choose a different number, -1 fills up the others' rows.
        """
        layers = self._layers.pop(chunk.id, {})
        if not layers:
            return np.empty((chunk.num_tokens, 0, 0), np.int16)
        most = max(chosen.shape[1] for chosen in layers.values())
        found = np.full((chunk.num_tokens, len(layers), most), -1, np.int16)
        for place, layer in enumerate(sorted(layers)):
            found[:, place, : layers[layer].shape[1]] = layers[layer]
        return found
