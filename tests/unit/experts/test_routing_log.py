"""The log of routing: layers in order, per chunk, forgotten once taken."""

from __future__ import annotations

import numpy as np

from tests.support.chunks import make_chunk
from thermocline.experts.routing_log import RoutingLog
from thermocline.messages import LayerIndex, Routing


def test_chunks_are_kept_apart_and_layers_in_order():
    """Whatever the order of recording, each chunk's choices come back as [T, layers, K], once."""
    log = RoutingLog()
    chunks = [make_chunk(number) for number in range(2)]
    for layer in (1, 0):
        for chunk in chunks:
            ids = np.full((3, 2), 10 * chunk.id + layer, np.int32)
            log.record(chunk, LayerIndex(layer), Routing(ids, np.ones((3, 2), np.float32)))
    for chunk in chunks:
        taken = log.take(chunk)
        assert (taken.shape, taken.dtype) == ((3, 2, 2), np.int16)
        assert taken[0, :, 0].tolist() == [10 * chunk.id, 10 * chunk.id + 1]
        assert log.take(chunk).size == 0
