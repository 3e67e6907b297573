"""Metrics of the engine, the process and its connections, from counters that others keep."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

import psutil

from thermocline import __version__
from thermocline.server.metrics.exposition import Family, Sample, counter, gauge, labelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.engine.statistics import EngineStatistics
    from thermocline.experts.cache.store_statistics import StoreStatistics
    from thermocline.experts.layer_hits import LayerHitStatistics
    from thermocline.pipeline.scheduling.scheduler import SchedulerSnapshot
    from thermocline.prefetch.governor import PrefetchStatistics
    from thermocline.remote.calls import ClientStatistics
    from thermocline.remote.compute import RemoteStatistics
    from thermocline.server.core.connection import ConnectionCounts
    from thermocline.server.metrics.exposition import MetricKind


def scheduler_families(snapshot: SchedulerSnapshot) -> list[Family]:
    """Return the requests by state, and the use of the cache's blocks."""
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
            "Cached blocks that were evicted.",
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


def spill_families(statistics: EngineStatistics) -> list[Family]:
    """Return what the second tier of the prompt cache holds, and what came of it; nothing without one."""
    spill = statistics.spill
    if spill is None:
        return []
    used = dict(zip(spill.levels, spill.used_bytes, strict=True))
    capacity = dict(zip(spill.levels, spill.capacity_bytes, strict=True))
    texts = (
        ("written_bytes", "Bytes copied to it.", spill.total_written_bytes),
        ("read_bytes", "Bytes read back.", spill.total_read_bytes),
        ("hits", "Times that parts came back for a request.", spill.total_returns),
        ("hit_tokens", "Tokens not computed again for that.", spill.total_returned_tokens),
        ("lost", "Parts that were evicted before they were copied.", spill.total_lost),
        ("dropped", "Parts that it had no room for any more.", spill.total_dropped),
        ("refused", "Times that computing was expected to be faster.", spill.total_refused),
        ("damaged", "Parts that the disk did not give back as they were.", spill.total_damaged),
    )  # fmt: skip
    return [
        labelled("kv_spill_bytes", "gauge", "What the prompt cache's second tier holds.", "level", used),
        labelled("kv_spill_capacity_bytes", "gauge", "What it has room for.", "level", capacity),
        *(counter(f"kv_spill_{name}_total", text, value) for name, text, value in texts),
    ]  # fmt: skip


def draft_families(statistics: EngineStatistics) -> list[Family]:
    """Return what speculation drafted, and what of it was right."""
    drafts = statistics.drafts
    return [
        labelled(
            "draft_tokens_total",
            "counter",
            "Drafted tokens that decode steps verified.",
            "drafter",
            {name: drafted for name, (drafted, _) in drafts.items()},
        ),
        labelled(
            "draft_tokens_accepted_total",
            "counter",
            "Those of them that the model chose.",
            "drafter",
            {name: accepted for name, (_, accepted) in drafts.items()},
        ),
        gauge(
            "speculation_off",
            "1 if the latest draft was not verified, or nothing can be drafted.",
            float(statistics.why_not_drafted is not None),
        ),
    ]


def expert_families(statistics: EngineStatistics) -> list[Family]:
    """Return how experts were chosen and found. /experts has the figures of each expert."""
    placement, hot_choices = statistics.placement, statistics.num_hot_choices
    remote = statistics.remote
    num_remote, remote_choices = 0, 0
    if remote is not None:
        num_remote, remote_choices = sum(remote.num_experts), remote.total_choices
    families = [
        labelled(
            "expert_selected_total",
            "counter",
            "Times an expert was chosen for a token.",
            "tier",
            {
                "hot": hot_choices,
                "cold": statistics.num_choices - hot_choices - remote_choices,
                "remote": remote_choices,
            },
        ),
        labelled(
            "expert_resident",
            "gauge",
            "Experts by where they are computed.",
            "tier",
            {
                "hot": placement.num_hot,
                "cold": placement.num_cold - num_remote,
                "remote": num_remote,
            },
        ),
    ]
    hits, misses = {}, {}
    if statistics.prefetch is not None:
        families += _prefetch_families(statistics.prefetch)
        hits["memory"] = statistics.prefetch.total_hits
        misses["memory"] = statistics.prefetch.total_misses
    if statistics.store is not None:
        families += _store_families(statistics.store)
        families += _layer_families(statistics.layer_hits)
        hits["device"] = statistics.store.total_hits
        misses["device"] = statistics.store.total_misses
    if statistics.allocation is not None and statistics.allocation.has_non_expert:
        lent = statistics.kv_bytes_lent
        families.append(
            labelled(
                "device_kv_bytes",
                "gauge",
                "Device memory of the KV cache, by who has it now.",
                "holder",
                {"cache": statistics.allocation.kv_bytes - lent, "experts": lent},
            )
        )
    if hits:
        families += [
            labelled(
                "expert_cache_hits_total",
                "counter",
                "Chosen experts that were in memory (as often as layers asked), or on the device (as often "
                "as tokens chose them).",
                "place",
                hits,
            ),
            labelled(
                "expert_cache_misses_total",
                "counter",
                "Chosen experts that were not read ahead, or that the CPU computed.",
                "place",
                misses,
            ),
        ]
    if remote is not None:
        families += _worker_families(remote)
    return families


# Name, kind, help and value of each figure of a worker.
_WORKER_FIGURES: Final[
    tuple[tuple[str, MetricKind, str, Callable[[ClientStatistics], float]], ...]
] = (
    ("ready", "gauge", "Whether a worker answers.", lambda w: w.state == "ready"),
    ("calls_total", "counter", "Answered requests.", lambda w: w.total_calls),
    ("sent_bytes_total", "counter", "Bytes to it.", lambda w: w.total_sent_bytes),
    ("received_bytes_total", "counter", "Bytes from it.", lambda w: w.total_received_bytes),
    (
        "wait_seconds_total",
        "counter",
        "Time from sending to answer, summed over requests.",
        lambda w: w.total_wait_ns * 1e-9,
    ),
    ("failures_total", "counter", "Requests without an answer.", lambda w: w.total_failures),
    (
        "connections_total",
        "counter",
        "Times that it was connected, the first included.",
        lambda w: w.total_connections,
    ),
    ("queue", "gauge", "Requests that wait to be sent.", lambda w: w.current_queued),
    (
        "link_bytes_per_second",
        "gauge",
        "Speed of the link of late, both directions together; 0 while it is unknown.",
        lambda w: w.link_bytes_per_s,
    ),
)


def _worker_families(remote: RemoteStatistics) -> list[Family]:
    """Label workers by their position among the flags: an address may tell more than a metric should."""
    families = []
    for name, kind, text, value in _WORKER_FIGURES:
        values = {str(number): value(worker) for number, worker in enumerate(remote.workers)}
        families.append(labelled(f"worker_{name}", kind, text, "worker", values))
    text = "Parts of a layer computed here because a worker had failed or was late."
    hedged = (
        "Parts of a layer computed here as well, because a worker's answer was later than usual."
    )
    return [
        *families,
        counter("worker_fallbacks_total", text, remote.total_fallbacks),
        counter("worker_hedges_total", hedged, remote.total_hedges),
    ]


def _store_families(store: StoreStatistics) -> list[Family]:
    return [
        counter(
            "expert_cache_staged_total",
            "Choices whose expert was copied to the device for one chunk alone.",
            store.total_staged,
        ),
        counter("expert_cache_uploads_total", "Experts copied to stay.", store.total_uploads),
        counter(
            "expert_cache_evictions_total", "Experts that were evicted.", store.total_evictions
        ),
        counter(
            "expert_cache_upload_bytes_total",
            "Bytes of experts copied to the device.",
            store.total_upload_bytes,
        ),
        labelled(
            "expert_cache_bytes",
            "gauge",
            "Device memory for experts.",
            "state",
            {"used": store.resident_bytes, "capacity": store.capacity_bytes},
        ),
    ]


def _layer_families(layers: LayerHitStatistics) -> list[Family]:
    return [
        counter(
            "expert_cache_layers_total",
            "Layers of decode steps, once per step.",
            layers.total_layers,
        ),
        counter(
            "expert_cache_layer_hits_total",
            "Those whose chosen experts were all on the device.",
            layers.total_hot_layers,
        ),
        gauge(
            "expert_cache_layer_hit_ratio",
            "Share of them since the start.",
            layers.hot_share,
        ),
    ]


def _prefetch_families(prefetch: PrefetchStatistics) -> list[Family]:
    return [
        counter("prefetch_issued_total", "Experts that were read ahead.", prefetch.total_experts),
        counter(
            "prefetch_late_total", "Chosen experts whose read had not ended.", prefetch.total_late
        ),
        counter(
            "prefetch_dropped_total", "Hints that were dropped unread.", prefetch.total_dropped
        ),
        counter("prefetch_refused_total", "Reads that the system refused.", prefetch.total_refused),
        counter("prefetch_bytes_total", "Bytes read ahead, or found there.", prefetch.total_bytes),
        counter(
            "prefetch_wasted_bytes_total",
            "Bytes read ahead and let go unused.",
            prefetch.total_wasted_bytes,
        ),
    ]


def process_families() -> list[Family]:
    """Return the system's figures of this process."""
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
    except (psutil.Error, OSError):  # not every system or container has it
        return families
    return [
        *families,
        counter("disk_read_bytes_total", "Bytes read from storage by the process.", read_bytes),
    ]


def connection_families(counts: ConnectionCounts) -> list[Family]:
    """Return the counts of connections."""
    return [
        gauge("connections", "Open connections.", counts.num_open),
        counter(
            "connections_refused_total",
            "Connections above --max-connections.",
            counts.total_refused,
        ),
        counter(
            "idle_connections_closed_total",
            "Connections without a request, closed to make place for others.",
            counts.total_idle_closed,
        ),
        counter(
            "header_timeouts_total",
            "Connections closed before a header was complete.",
            counts.total_header_timeouts,
        ),
        counter(
            "slow_readers_total",
            "Connections cut because their client did not read.",
            counts.total_slow_readers,
        ),
    ]
