"""The bodies of live events, from readings of the engine; shares and speeds are differences of two. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.traces.lanes import WORK_LANES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.engine.statistics import EngineStatistics
    from thermocline.pipeline.scheduling.scheduler import RequestSnapshot, SchedulerSnapshot
    from thermocline.server.core.bodies import JsonObject
    from thermocline.traces.lanes import Track

_LANES_WINDOW_S: Final = 1.0
# Long enough for a steady number also where a model is slow.
_SPEED_WINDOW_S: Final = 2.0
# Views show no more; the queue's counts include the others.
_MAX_REQUESTS: Final = 32


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the process holds, that are available, and that the machine has."""

    process_bytes: int
    available_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EngineReading:
    """An engine's counters at one time of the monotonic clock."""

    at_s: float
    scheduler: SchedulerSnapshot
    statistics: EngineStatistics
    busy_ns: Mapping[Track, int]
    is_tracing: bool


class Window:
    """The readings of the last seconds."""

    def __init__(self) -> None:
        self._readings: deque[EngineReading] = deque()

    def add(self, reading: EngineReading) -> None:
        """Add the newest reading, and drop those that no window needs."""
        if self._readings and reading.at_s - self._readings[-1].at_s > _SPEED_WINDOW_S:
            self._readings.clear()  # there were no readers meanwhile
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.at_s - self._readings[1].at_s >= _SPEED_WINDOW_S:
            self._readings.popleft()

    def before(self, seconds: float) -> EngineReading | None:
        """Return the reading nearest to `seconds` before the newest; None without another one."""
        newest = self._readings[-1]
        others = [reading for reading in self._readings if reading is not newest]
        return min(others, key=lambda r: abs(newest.at_s - r.at_s - seconds), default=None)

    def body(self) -> JsonObject:
        """Return the fields of a live event about a running engine."""
        now = self._readings[-1]
        return {
            "tokens": _tokens(now.scheduler, now.at_s, self.before(_SPEED_WINDOW_S)),
            "lanes": _lanes(now, self.before(_LANES_WINDOW_S)),
            "queue": {
                "running": now.scheduler.num_running,
                "waiting": now.scheduler.num_waiting,
                "decoding": now.scheduler.num_decoding,
                "preemptions": now.scheduler.total_preemptions,
            },
            "requests": [_request(each) for each in now.scheduler.requests[:_MAX_REQUESTS]],
            "kv": _cache(now.scheduler),
            "drafts": _drafts(now.statistics),
            "experts": _experts(now.statistics),
            "tracing": now.is_tracing,
        }


def _tokens(now: SchedulerSnapshot, at_s: float, before: EngineReading | None) -> JsonObject:
    body: JsonObject = {
        "prompt_total": now.total_prompt_tokens,
        "output_total": now.total_output_tokens,
        "prompt_per_second": None,
        "output_per_second": None,
    }
    if before is not None:
        seconds = at_s - before.at_s
        then = before.scheduler
        prompt = now.total_prompt_tokens - then.total_prompt_tokens
        output = now.total_output_tokens - then.total_output_tokens
        body["prompt_per_second"] = round(prompt / seconds, 2)
        body["output_per_second"] = round(output / seconds, 2)
    return body


def _lanes(now: EngineReading, before: EngineReading | None) -> list[JsonObject]:
    return [
        {
            "lane": track.label,
            "work": track.lane in WORK_LANES,
            "busy": None if before is None else _share(now, before, track),
        }
        for track in sorted(now.busy_ns, key=lambda track: track.order)
    ]


def _share(now: EngineReading, before: EngineReading, track: Track) -> float:
    # The clock is read shortly before or after the counters, so that a share may come out above 1.
    spent_ns = now.busy_ns[track] - before.busy_ns[track]
    return round(min(max(spent_ns * 1e-9 / (now.at_s - before.at_s), 0.0), 1.0), 4)


def _request(request: RequestSnapshot) -> JsonObject:
    num_computed = min(request.num_computed_tokens, request.num_prompt_tokens)
    is_prompt = num_computed < request.num_prompt_tokens
    return {
        "id": request.id,
        "state": "waiting" if not request.is_running else "prefill" if is_prompt else "decode",
        "prompt_tokens": request.num_prompt_tokens,
        "prompt_computed": num_computed,
        "output_tokens": request.num_known_tokens - request.num_prompt_tokens,
    }


def _drafts(now: EngineStatistics) -> JsonObject:
    counts = now.drafts.values()
    return {
        "drafted": sum(drafted for drafted, _ in counts),
        "accepted": sum(accepted for _, accepted in counts),
        "why_off": now.why_not_drafted,
    }


def _cache(now: SchedulerSnapshot) -> JsonObject:
    cache = now.cache
    queried = cache.total_queried_tokens
    return {
        "blocks": cache.num_blocks,
        "free": cache.num_free_blocks,
        "cached": cache.num_cached_blocks,
        "held": cache.num_held_blocks,
        "prefix_hit_share": round(cache.total_hit_tokens / queried, 4) if queried else None,
    }


def _experts(statistics: EngineStatistics) -> JsonObject:
    """Return the numbers of hot and cold experts, their choices, and how many were in memory when needed."""
    placement, prefetch = statistics.placement, statistics.prefetch
    body: JsonObject = {
        "hot": placement.num_hot,
        "cold": placement.num_cold,
        "choices": statistics.num_choices,
        "hot_share": round(statistics.hot_share, 4),
        "memory": None,
        "workers": [],
    }
    if statistics.remote is not None:
        body["workers"] = [
            {"state": worker.state, "link_bytes_per_second": round(worker.link_bytes_per_s)}
            for worker in statistics.remote.workers
        ]
    if prefetch is not None:
        hits, late, misses = prefetch.total_hits, prefetch.total_late, prefetch.total_misses
        request = hits + late + misses
        body["memory"] = {
            "hints": prefetch.total_hints,
            "needless": prefetch.total_needless,
            "resident": prefetch.is_resident,
            "hits": hits,
            "late": late,
            "misses": misses,
            "hit_share": round(hits / request, 4) if request else None,
            "read_bytes": prefetch.total_bytes,
        }
    return body
