"""Owns the closed vocabulary of a trace: lanes (one per resource) and event names. Knows no recorder.

A track is something that does one thing at a time, so that spans on it never partially overlap: a
device, a copy engine, one thread of a pool, the event loop's thread. A lane is a kind of such
resources; of most there is one. A new name is one more member here; free text is refused by the
recorder.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Self


class Lane(StrEnum):
    """The resources, in the order in which a viewer shows them."""

    # The enum's own hash is Python code; analysis looks names up for every span.
    __hash__ = str.__hash__

    REQUESTS = "requests"
    LOOP = "loop"  # the engine's event loop: commits, samples, plans
    SCHEDULER = "scheduler"
    DRAFT = "draft"  # what speculation does for decode steps: one drafts, or verifies, at a time
    GPU_COMPUTE = "gpu.compute"
    GPU_H2D = "gpu.h2d"
    HOT = "hot"  # the hot tier's device when that is neither a GPU nor the CPU pool
    CPU = "cpu"  # the threads of the CPU pool: one track each
    PAGECACHE = "pagecache"
    SPILL = "spill"  # what copies parts of the prompt cache to its second tier, and back
    REMOTE = "remote"
    EXCHANGE = "exchange"  # what ranks of one model give each other


class Track(NamedTuple):
    """One row of the timeline: a lane, and which of its resources (0 where there is one)."""

    lane: Lane
    number: int = 0

    @property
    def label(self) -> str:
        """How the track is called: "loop", "cpu 0", "cpu 1"."""
        is_one_of_many = self.lane is Lane.CPU or self.number > 0
        return f"{self.lane} {self.number}" if is_one_of_many else str(self.lane)

    @classmethod
    def from_label(cls, label: str) -> Self:
        """Return the track of that label; raises ValueError if there is none."""
        lane, _, index = label.partition(" ")
        track = cls(Lane(lane), int(index or 0))
        if track.number < 0 or track.label != label:
            raise ValueError(f"{label!r} is not a valid track")
        return track

    @property
    def order(self) -> tuple[int, int]:
        """Sorts tracks as a viewer shows them."""
        return _LANE_ORDER[self.lane], self.number


_LANE_ORDER = {lane: position for position, lane in enumerate(Lane)}


class Name(StrEnum):
    """What a span, instant, flow or asynchronous span can be called, and a counter that is not a channel's."""

    __hash__ = str.__hash__

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
    HEDGE = "hedge"
    EXCHANGE = "exchange"

    DRAFT = "draft"
    VERIFY = "verify"

    STEP = "step"
    PLAN = "plan"
    CHUNK = "chunk"
    KV_FREE = "kv blocks free"
    KV_CACHED = "kv blocks cached"
    KV_HELD = "kv blocks held"

    LOAD = "load"
    COPY = "copy"
    HIT = "hit"
    LATE = "late"
    MISS = "miss"
    WASTED = "wasted"
    BYTES_IN_FLIGHT = "bytes in flight"
    EVICT = "evict"
    RESIDENT_BYTES = "expert bytes on the device"

    REQUEST = "request"
    FIRST_TOKEN = "first_token"


# Lanes whose time is computing or moving bytes. Only these count as work that can overlap: a busy
# event loop next to a busy kernel is bookkeeping and must not flatter the overlapped share.
WORK_LANES: frozenset[Lane] = frozenset(
    {
        Lane.GPU_COMPUTE,
        Lane.GPU_H2D,
        Lane.HOT,
        Lane.CPU,
        Lane.PAGECACHE,
        Lane.SPILL,
        Lane.REMOTE,
        Lane.EXCHANGE,
    }
)
