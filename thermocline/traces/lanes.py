"""Owns the closed vocabulary of a trace: lanes (one per resource) and event names. Knows no recorder.

A lane is something that does one thing at a time, so that spans on it never partially overlap: a
device, a copy engine, a thread pool that runs one job at a time, the event loop's thread. A new name
is one more member here; free text is refused by the recorder.
"""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    """The resources, in the order in which a viewer shows them."""

    REQUESTS = "requests"
    HTTP = "http"
    LOOP = "loop"
    SCHEDULER = "scheduler"
    GPU_COMPUTE = "gpu.compute"
    GPU_H2D = "gpu.h2d"
    CPU_TRUNK = "cpu.trunk"  # dense CPU work: embed, attend, router, combine, head
    HOT = "hot"  # the hot tier's device when that is a CPU lane
    CPU_COLD = "cpu.cold"
    PAGECACHE = "pagecache"
    REMOTE = "remote"


class Name(StrEnum):
    """What a span, instant, flow or asynchronous span can be called."""

    EMBED = "embed"
    LAYER = "layer"
    ATTEND = "attend"
    ROUTER = "router"
    PREFETCH = "prefetch"
    HOT = "hot"
    COLD = "cold"
    COMBINE = "combine"
    HEAD = "head"
    REMOTE = "remote"

    STEP = "step"
    PLAN = "plan"
    COMMIT = "commit"
    PREEMPT = "preempt"
    CHUNK = "chunk"
    CHANNEL_DEPTH = "channel depth"

    LOAD = "load"
    ADVISE = "advise"
    COPY = "copy"
    HIT = "hit"
    LATE = "late"
    MISS = "miss"
    WASTED = "wasted"
    EVICT = "evict"

    DRAFT = "draft"
    VERIFY = "verify"
    SAMPLE = "sample"

    REQUEST = "request"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    FIRST_TOKEN = "first_token"
    ABORT = "abort"
    RENDER = "render"
    TOKENIZE = "tokenize"


# Lanes whose time is computing or moving bytes. Only these count as work that can overlap: a busy
# event loop next to a busy kernel is bookkeeping and must not flatter the overlapped share.
WORK_LANES: frozenset[Lane] = frozenset(
    {
        Lane.GPU_COMPUTE,
        Lane.GPU_H2D,
        Lane.CPU_TRUNK,
        Lane.HOT,
        Lane.CPU_COLD,
        Lane.PAGECACHE,
        Lane.REMOTE,
    }
)
