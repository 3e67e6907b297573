"""Sees every routing decision, whoever computes the experts: for heat, counters, requests that ask, and the expert cache."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from thermocline.messages import LayerIndex, Routing

if TYPE_CHECKING:
    from thermocline.experts.cache.store import ExpertStore
    from thermocline.experts.heat import ExpertHeat
    from thermocline.experts.layer_hits import LayerHits
    from thermocline.experts.routing_log import RoutingLog
    from thermocline.messages import Chunk, IntArray


class RoutingObserver:
    """Tells those who count. Called on the lanes that route, from one at a time.

    store: of a device whose experts change, else None. last_layer: the last one with routed experts.
    """

    def __init__(
        self,
        heat: ExpertHeat,
        routing_log: RoutingLog,
        store: ExpertStore | None,
        last_layer: LayerIndex,
        layer_hits: LayerHits,
    ) -> None:
        self._heat = heat
        self._layer_hits = layer_hits
        self._routing_log = routing_log
        self._store = store
        self._last_layer = last_layer
        self._counting = threading.Lock()

    def observe(self, chunk: Chunk, layer: LayerIndex, routing: Routing) -> None:
        """Take note of a layer's choices, before its experts are dispatched."""
        with self._counting:
            self._heat.record(layer, routing)
            if chunk.is_prompt:
                self._heat.record_repeats(layer, routing.expert_ids[: chunk.segments[0].length])
            if chunk.wants_routing:
                self._routing_log.record(chunk, layer, routing)
            if self._store is not None:
                self._store.observe(layer, routing, is_step_end=layer == self._last_layer)

    def observe_step(
        self, chunk: Chunk, layers: IntArray, routing: Routing, residency: IntArray
    ) -> None:
        """Take note of a step through all layers, whose hot experts a device computed.

        routing: [n, T, K], of the layers int32 [n], those with routed experts. residency: int32 [all layers, E], the slots that the
        step went by, below zero for what was not on the device.
        """
        ids = routing.expert_ids
        with self._counting:
            num_hits, num_hot = self._heat.record_step(layers, ids, residency)
            self._layer_hits.count_step(len(layers), num_hot)
            if chunk.wants_routing:
                for n, layer in enumerate(layers.tolist()):
                    self._routing_log.record(
                        chunk, LayerIndex(layer), Routing(ids[n], routing.weights[n])
                    )
            if self._store is not None:
                self._store.count_hits(num_hits)
                self._store.observe_step(layers, ids)

    def assigned(self, chunk: Chunk, routing: Routing, *, is_hot: bool) -> None:
        """Take note of who computes a layer's experts. is_hot: all of them are hot."""
        with self._counting:
            self._layer_hits.count(chunk, routing, is_hot=is_hot)
