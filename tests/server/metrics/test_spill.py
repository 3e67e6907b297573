"""Metrics of the prompt cache's second tier."""

from __future__ import annotations

import numpy as np

from thermocline.engine.statistics import EngineStatistics
from thermocline.experts.placement.placement import uniform_placement
from thermocline.pipeline.scheduling.request_spill import SpillStatistics
from thermocline.server.metrics.figures import spill_families

PLAIN = EngineStatistics((), np.zeros((2, 4), np.int64), uniform_placement(2, 4, 0.5), None)


def test_each_level_and_each_counter_is_there():
    """With the numbers that the engine has."""
    spill = SpillStatistics(("memory", "disk"), (10, 20), (100, 200), *range(1, 9))
    families = spill_families(EngineStatistics((), PLAIN.heat, PLAIN.placement, None, spill=spill))
    samples = {
        (family.name, *(value for _, value in sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["kv_spill_bytes", "memory"] == 10
    assert samples["kv_spill_capacity_bytes", "disk"] == 200
    counted = ("written_bytes", "read_bytes", "hits", "hit_tokens", "lost", "dropped", "refused")
    assert [samples[f"kv_spill_{name}_total",] for name in (*counted, "damaged")] == [*range(1, 9)]


def test_without_a_tier_there_is_nothing():
    """A server without --cache-spill has no figures of it."""
    assert spill_families(PLAIN) == []
