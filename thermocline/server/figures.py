"""What /metrics shows of the engine and of the process, as families. Reads only what others count."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import psutil

from thermocline import __version__
from thermocline.server.exposition import Family, Sample, counter, gauge, labelled

if TYPE_CHECKING:
    from thermocline.engine import EngineStatistics
    from thermocline.pipeline.scheduler import SchedulerSnapshot
    from thermocline.prefetch.governor import PrefetchStatistics
    from thermocline.server.connection import ConnectionCounts


def scheduler_families(snapshot: SchedulerSnapshot) -> list[Family]:
    """Return who runs and waits, and what the cache's blocks are used for."""
    cache = snapshot.cache
    blocks = {
        "free": cache.num_free_blocks,
        "cached": cache.num_cached_blocks,
        "held": cache.num_held_blocks,
    }
    num_held = cache.num_held_window_blocks
    windows = {"available": cache.num_window_blocks - num_held, "held": num_held}
    return [
        gauge("requests_processing", "Requests with a place in the cache.", snapshot.num_running),
        gauge("requests_deferred", "Requests that wait for one.", snapshot.num_waiting),
        gauge("requests_decoding", "Requests past their prompt.", snapshot.num_decoding),
        counter(
            "preemptions_total",
            "Requests that lost their place for a while.",
            snapshot.total_preemptions,
        ),
        gauge(
            "kv_cache_usage_ratio",
            "Share of the cache's blocks that requests hold.",
            cache.num_held_blocks / cache.num_blocks,
        ),
        labelled("kv_cache_blocks", "gauge", "The cache's blocks.", "state", blocks),
        labelled(
            "kv_window_blocks", "gauge", "Those of layers with a sliding window.", "state", windows
        ),
        counter(
            "kv_cache_evictions_total",
            "Blocks that could be found, and gave way.",
            cache.total_evicted_blocks,
        ),
        counter(
            "prefix_cache_queries_total",
            "Tokens of requests that looked for a computed prefix.",
            cache.total_queried_tokens,
        ),
        counter(
            "prefix_cache_hits_total", "Those that were found computed.", cache.total_hit_tokens
        ),
    ]


def expert_families(statistics: EngineStatistics) -> list[Family]:
    """Return how experts were chosen and found. No figure of a single one: those are in /experts."""
    placement, hot_choices = statistics.placement, statistics.num_hot_choices
    families = [
        labelled(
            "expert_selected_total",
            "counter",
            "Times an expert was chosen for a token.",
            "tier",
            {"hot": hot_choices, "cold": statistics.num_choices - hot_choices},
        ),
        labelled(
            "expert_resident",
            "gauge",
            "Experts by where they are computed.",
            "tier",
            {"hot": placement.num_hot, "cold": placement.num_cold},
        ),
    ]
    if statistics.prefetch is not None:
        families += _prefetch_families(statistics.prefetch)
    return families


def _prefetch_families(prefetch: PrefetchStatistics) -> list[Family]:
    return [
        counter(
            "expert_cache_hits_total", "Chosen experts that were in memory.", prefetch.total_hits
        ),
        counter(
            "expert_cache_misses_total",
            "Chosen experts that nobody had asked for.",
            prefetch.total_misses,
        ),
        counter("prefetch_issued_total", "Experts that were asked for.", prefetch.total_experts),
        counter("prefetch_late_total", "Chosen experts on their way.", prefetch.total_late),
        counter("prefetch_dropped_total", "Hints that were not looked at.", prefetch.total_dropped),
        counter("prefetch_refused_total", "Reads that the system refused.", prefetch.total_refused),
        counter("prefetch_bytes_total", "Bytes read ahead, or found there.", prefetch.total_bytes),
        counter(
            "prefetch_wasted_bytes_total",
            "Bytes read ahead and let go unused.",
            prefetch.total_wasted_bytes,
        ),
    ]


def process_families() -> list[Family]:
    """Return what the system counts for this process."""
    process = psutil.Process()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    faults = {"true": usage.ru_majflt, "false": usage.ru_minflt}
    families = [
        Family("build_info", "gauge", "This version.", (Sample(1, (("version", __version__),)),)),
        labelled(
            "page_faults_total",
            "counter",
            "Pages that were not mapped; major ones were read from the disk.",
            "major",
            faults,
        ),
        gauge("resident_memory_bytes", "Memory of the process.", process.memory_info().rss),
        counter("cpu_seconds_total", "Time on processors.", usage.ru_utime + usage.ru_stime),
        gauge("start_time_seconds", "When the process began.", process.create_time()),
    ]
    try:
        read_bytes = process.io_counters().read_bytes
    except (psutil.Error, OSError):  # not every system or container tells
        return families
    return [
        *families,
        counter("disk_read_bytes_total", "Bytes read from storage by the process.", read_bytes),
    ]


def connection_families(counts: ConnectionCounts) -> list[Family]:
    """Return what happened to connections."""
    return [
        gauge("connections", "Open connections.", counts.num_open),
        counter("connections_refused_total", "One more than may be open.", counts.total_refused),
        counter(
            "header_timeouts_total",
            "Connections closed before a header was complete.",
            counts.total_header_timeouts,
        ),
        counter(
            "slow_readers_total",
            "Connections cut since their client did not read.",
            counts.total_slow_readers,
        ),
    ]
