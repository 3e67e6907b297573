"""What a live event says, out of counters: shares and speeds over the right windows."""

from __future__ import annotations

import numpy as np

from thermocline.engine.statistics import EngineStatistics
from thermocline.experts.placement.placement import uniform_placement
from thermocline.messages import RequestId
from thermocline.pipeline.scheduling.cache_snapshot import CacheSnapshot
from thermocline.pipeline.scheduling.scheduler import RequestSnapshot, SchedulerSnapshot
from thermocline.server.dashboard.live import EngineReading, Window
from thermocline.traces.lanes import Lane, Track

CPU = Track(Lane.CPU, 0)


def reading(at_s: float, *, output: int = 0, prompt: int = 0, busy_s: float = 0.0, requests=()):
    """Return a reading of an engine with two layers of four experts, half of them hot."""
    scheduler = SchedulerSnapshot(
        num_waiting=1,
        num_running=len(requests),
        num_decoding=0,
        num_prompt_chunks=0,
        num_decode_chunks=0,
        prompt_tokens_limit=512,
        total_preemptions=0,
        total_prompt_tokens=prompt,
        total_output_tokens=output,
        cache=CacheSnapshot(16, 10, 2, 4, 0, 8, 2),
        requests=tuple(requests),
    )
    heat = np.array([[3, 0, 1, 0], [0, 0, 4, 0]])
    statistics = EngineStatistics((), heat, uniform_placement(2, 4, 0.5), None)
    return EngineReading(at_s, scheduler, statistics, {CPU: round(busy_s * 1e9)}, is_tracing=False)


def window(*readings) -> Window:
    """Return a window that has seen these readings."""
    made = Window()
    for each in readings:
        made.add(each)
    return made


def test_the_first_event_has_no_shares_and_no_speeds():
    """There is nothing to compare with yet, and nothing is made up."""
    body = window(reading(5.0, output=100, busy_s=3.0)).body()
    assert body["lanes"] == [{"lane": "cpu 0", "work": True, "busy": None}]
    assert body["tokens"]["output_per_second"] is None
    assert body["tokens"]["output_total"] == 100


def test_lanes_are_of_the_last_second_and_speeds_of_the_last_two():
    """Work and tokens from before their window count no more."""
    steps = [reading(0.5 * n, output=n * n, prompt=10 * n, busy_s=0.1 * n * n) for n in range(9)]
    body = window(*steps).body()
    assert body["lanes"][0]["busy"] == 1.0  # (6.4 - 3.6) s of one second, as a counter might err
    assert body["tokens"]["output_per_second"] == (64 - 16) / 2
    assert body["tokens"]["prompt_per_second"] == 20.0


def test_a_pause_without_listeners_is_no_window():
    """After it, the next event compares with nothing, rather than with minutes ago."""
    body = window(reading(0.0), reading(0.3, output=5), reading(60.0, output=5000)).body()
    assert body["tokens"]["output_per_second"] is None


def test_the_window_stays_small():
    """However long somebody listens."""
    made = window(*(reading(0.1 * n) for n in range(1000)))
    assert len(made._readings) <= 22


def test_requests_are_shown_by_what_they_wait_for():
    """No place yet; its prompt; its answer. What is computed of the answer is no prompt."""
    requests = [
        RequestSnapshot(RequestId(1), False, 9, 0, 9),
        RequestSnapshot(RequestId(2), True, 9, 4, 9),
        RequestSnapshot(RequestId(3), True, 9, 12, 13),
    ]
    body = window(reading(1.0, requests=requests)).body()
    assert [each["state"] for each in body["requests"]] == ["waiting", "prefill", "decode"]
    assert [each["prompt_computed"] for each in body["requests"]] == [0, 4, 9]
    assert [each["output_tokens"] for each in body["requests"]] == [0, 0, 4]


def test_tiers_cache_and_experts_are_told():
    """Hot and cold, the share of choices that was hot, the cache's blocks and its hits."""
    body = window(reading(1.0)).body()
    assert body["experts"] | {"memory": None} == {
        "hot": 4,
        "cold": 4,
        "choices": 8,
        "hot_share": 1.0,
        "memory": None,
        "workers": [],
    }
    assert body["kv"] == {
        "blocks": 16,
        "free": 10,
        "cached": 2,
        "held": 4,
        "prefix_hit_share": 0.25,
    }
    assert body["drafts"] == {"drafted": 0, "accepted": 0, "why_off": None}
