"""Decides whether a chunk's experts are offloaded to a device or workers, or all computed on the CPU. Pure.

Microbenchmarks miss the overhead of splitting a layer (threads that take turns, hops between lanes), so chunks
are timed both ways, and the faster way is taken. Chunks are compared with chunks of about the same size. Where the
estimates promise little, chunks begin on the CPU, since a program that asks once has only first chunks.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.messages import Chunk, ChunkId, LayerIndex

# The slower way is tried again after so many chunks, then after twice as many, and so on up to the maximum.
_RETRY_AFTER: Final = 256
_MAX_RETRY_AFTER: Final = 4096
# Chunks that try a way.
_TRIAL_CHUNKS: Final = 3
# Both ways are compared again after so many chunks: two medians take as long as a small layer's bookkeeping.
_COMPARE_EVERY: Final = 4
_NUM_SAMPLES: Final = 15
# Chunks in flight that are timed. The oldest is dropped: it has failed or was cancelled.
_MAX_IN_FLIGHT: Final = 16


@dataclass(slots=True)
class _SizeClass:
    """Chunks of about one size. offloaded, on_cpu: the last times of either way, in seconds per token.

    offloads: the way that is taken now. is_trial: that way is being tried, as both are at first. num_chunks: since
    the way was last chosen.
    """

    offloaded: deque[float] = field(default_factory=partial(deque, maxlen=_NUM_SAMPLES))
    on_cpu: deque[float] = field(default_factory=partial(deque, maxlen=_NUM_SAMPLES))
    offloads: bool = True
    num_chunks: int = 0
    retry_after: int = _RETRY_AFTER
    is_trial: bool = True
    first_retry: int = _RETRY_AFTER

    @classmethod
    def begun(cls, *, offloads: bool, first_retry: int) -> _SizeClass:
        """Return one that begins with offloading, or that tries it only after `first_retry` chunks."""
        return cls(
            offloads=offloads, is_trial=offloads, retry_after=first_retry, first_retry=first_retry
        )

    def add(self, seconds_per_token: float, *, offloaded: bool) -> None:
        """Take in one chunk's time, and choose the way of the next ones."""
        (self.offloaded if offloaded else self.on_cpu).append(seconds_per_token)
        if not (self.is_trial or self.offloaded):
            self.num_chunks += 1
            self.offloads = self.is_trial = self.num_chunks >= self.retry_after
            return
        if min(len(self.offloaded), len(self.on_cpu)) < _TRIAL_CHUNKS:
            self.offloads = len(self.offloaded) < _TRIAL_CHUNKS
            return
        if offloaded is not self.offloads:
            return  # it began before the last decision
        self.num_chunks += 1
        if not self.is_trial and self.num_chunks % _COMPARE_EVERY:
            return
        # Medians: single outliers do not count.
        faster = statistics.median(self.offloaded) <= statistics.median(self.on_cpu)
        if self.is_trial:
            lost = faster is not self.offloads
            self.retry_after = (
                min(2 * self.retry_after, _MAX_RETRY_AFTER) if lost else self.first_retry
            )
            self.is_trial, self.offloads, self.num_chunks = False, faster, 0
        elif self.num_chunks >= self.retry_after or faster is not self.offloads:
            self.is_trial, self.offloads = True, not self.offloads
            (self.offloaded if self.offloads else self.on_cpu).clear()


class OffloadSelector:
    """Chooses the faster way by size class: 1 token, 2 to 3, 4 to 7, ..."""

    def __init__(
        self,
        promises: Callable[[int], bool] = lambda num_tokens: True,
        *,
        first_retry: int = _RETRY_AFTER,
    ) -> None:
        """promises: whether estimates say that offloading chunks of so many tokens pays. Asked once per class.

        first_retry: chunks until the slower way is tried again for the first time.
        """
        self._first_retry = first_retry
        self._classes: dict[int, _SizeClass] = {}
        self._promises = promises

    def offloads(self, num_tokens: int) -> bool:
        """Return whether the next chunk of so many tokens is offloaded."""
        return self._class_of(num_tokens).offloads

    def observe(self, num_tokens: int, seconds: float, *, offloaded: bool) -> None:
        """Take in how long a chunk took, without the time in which it overlapped the one before."""
        self._class_of(num_tokens).add(seconds / num_tokens, offloaded=offloaded)

    def _class_of(self, num_tokens: int) -> _SizeClass:
        found = self._classes.get(num_tokens.bit_length())
        if found is None:
            found = _SizeClass.begun(
                offloads=self._promises(num_tokens), first_retry=self._first_retry
            )
            found = self._classes.setdefault(num_tokens.bit_length(), found)
        return found


class _Start(NamedTuple):
    """When a chunk's first layer with experts was routed, in seconds, and whether the chunk is offloaded."""

    at_s: float
    offloaded: bool


class ChunkTimes:
    """Times chunks from their first to their last layer with experts, for an `OffloadSelector`.

    Of two chunks in flight together, the second is timed from the end of the first. clock: seconds.
    """

    def __init__(
        self, selector: OffloadSelector, last_layer: LayerIndex, clock: Callable[[], float]
    ) -> None:
        self.selector = selector
        self._last_layer = last_layer
        self._clock = clock
        self._starts: dict[ChunkId, _Start] = {}
        self._last_end_s = 0.0

    @property
    def num_in_flight(self) -> int:
        """Chunks that are being timed."""
        return len(self._starts)

    def offloads(self, chunk: Chunk) -> bool:
        """Return whether this chunk is offloaded: as it began, or as the selector says."""
        start = self._starts.get(chunk.id)
        return self.selector.offloads(chunk.num_tokens) if start is None else start.offloaded

    def note_step(self, chunk: Chunk, first_s: float, last_s: float, *, offloaded: bool) -> None:
        """Take note of a decode step that was one job: when its first and its last layer with experts were routed."""
        seconds = last_s - max(first_s, self._last_end_s)
        self.selector.observe(chunk.num_tokens, seconds, offloaded=offloaded)
        self._last_end_s = last_s

    def note(self, chunk: Chunk, layer: LayerIndex, *, offloaded: bool) -> None:
        """Take note of a layer with experts that was just routed, from the lane that routes."""
        if layer != self._last_layer and chunk.id in self._starts:
            return
        if chunk.is_prompt and chunk.positions[0]:
            return  # attention takes longer with each chunk of a prompt: only first ones are alike
        now_s = self._clock()
        if layer == self._last_layer:
            start = self._starts.pop(chunk.id, None)
            if start is not None and start.offloaded is offloaded:
                seconds = now_s - max(start.at_s, self._last_end_s)
                self.selector.observe(chunk.num_tokens, seconds, offloaded=offloaded)
            self._last_end_s = now_s
        else:
            while len(self._starts) >= _MAX_IN_FLIGHT:
                del self._starts[next(iter(self._starts))]
            self._starts[chunk.id] = _Start(now_s, offloaded)
