"""The one observer of routing: heat, the log of those who asked, and the expert cache hear of every layer once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_decode
from thermocline.experts.heat import ExpertHeat
from thermocline.experts.layer_hits import LayerHits
from thermocline.experts.routing_log import RoutingLog
from thermocline.experts.routing_observer import RoutingObserver
from thermocline.messages import LayerIndex, RequestId, Routing

ROUTING = Routing(np.array([[0, 2], [2, 3], [1, 2]], np.int32), np.ones((3, 2), np.float32))


class Store:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bool]] = []

    def observe(self, layer, routing, *, is_step_end):
        assert routing is ROUTING
        self.told.append((layer, is_step_end))


@pytest.mark.parametrize("wants_routing", [False, True])
def test_all_who_count_are_told_once(wants_routing):
    """Heat counts each choice, the log keeps them for whoever asked, and the cache hears where a step ends."""
    heat, log, store = ExpertHeat(2, 4), RoutingLog(), Store()
    observer = RoutingObserver(heat, log, store, LayerIndex(1), LayerHits())
    chunk = replace(make_chunk(5), wants_routing=wants_routing)
    for layer in range(2):
        observer.observe(chunk, LayerIndex(layer), ROUTING)
    assert heat.counts().tolist() == [[1, 1, 3, 1]] * 2
    assert heat.known().repeats.tolist() == [[2, 4]] * 2
    assert log.take(chunk).shape == ((3, 2, 2) if wants_routing else (3, 0, 0))
    assert store.told == [(0, False), (1, True)]


def test_repeats_are_of_consecutive_tokens_alone():
    """Those of a prompt's first request; tokens of a step are of several requests, one after the other."""
    heat = ExpertHeat(1, 4)
    observer = RoutingObserver(heat, RoutingLog(), None, LayerIndex(0), LayerHits())
    observer.observe(make_decode(make_chunk(0)), LayerIndex(0), ROUTING)
    assert heat.known().repeat_shares() is None
    chunk = make_chunk(1)
    first = chunk.segments[0]._replace(length=2)
    second = first._replace(request=RequestId(2), start=2, length=1)
    observer.observe(replace(chunk, segments=(first, second)), LayerIndex(0), ROUTING)
    assert heat.known().repeats.tolist() == [[1, 2]]


def test_without_a_cache_nobody_else_is_told():
    """A placement that never changes has no store."""
    heat = ExpertHeat(1, 4)
    RoutingObserver(heat, RoutingLog(), None, LayerIndex(0), LayerHits()).observe(
        make_chunk(0), LayerIndex(0), ROUTING
    )
    assert heat.counts().sum() == 6
