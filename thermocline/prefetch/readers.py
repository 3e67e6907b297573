"""Owns the threads that read experts into memory, and what waits for them, most urgent first.

Non-expert weights are read while no expert is wanted for the present layer or the next, and what is asked for as a rest
while nothing else waits. Each expert is read in pieces and is queued at most once; reads in flight are bounded by
threads x piece. Draws the page cache's lane: busy from the start of a read to the end of the last one that overlaps it.
Knows neither why an expert is wanted nor what is in memory.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.experts.catalog import ByteSpan
from thermocline.traces.busy import BusyTime
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Protocol

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.messages import ExpertKey, LayerIndex
    from thermocline.traces.recorder import Recorder

    class Advisor(Protocol):
        def fetch(self, span: ByteSpan) -> int:
            """Read the pages of `span`."""
            ...

        def release(self, span: ByteSpan) -> int:
            """Let go of the pages of `span`."""
            ...


# Measured on a virtual disk (docs/LOG.md): four reads of 1 MiB reach what the disk gives.
PIECE_BYTES = 1 << 20
NUM_THREADS = 4
# Experts of this urgency or a higher one go before non-expert weights.
_URGENT = 1


@dataclass(slots=True)
class _Busy:
    """The span being drawn: since when, reading what."""

    layer: int
    start_ns: int
    keys: set[ExpertKey]
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ReaderTotals:
    """Counters since the start."""

    total_experts: int
    total_bytes: int
    total_refused: int


class ReaderThreads:
    """Reads experts and releases experts. No method waits for a disk but `close`, for one piece each."""

    def __init__(
        self,
        catalog: ExpertCatalog,
        advisor: Advisor,
        recorder: Recorder,
        num_threads: int = NUM_THREADS,
        *,
        non_expert: Iterable[tuple[int, ByteSpan]] = (),
    ) -> None:
        """non_expert: the weights that every token reads, in this order, each with its layer."""
        self._all_non_expert = tuple(non_expert)
        self._catalog = catalog
        self._advisor = advisor
        self._recorder = recorder
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._order: list[tuple[int, int, ExpertKey]] = []
        self._waiting: dict[ExpertKey, deque[ByteSpan]] = {}
        self._reading: Counter[ExpertKey] = Counter()
        self._releases: deque[ByteSpan] = deque()
        self._non_expert: deque[tuple[int, ByteSpan]] = deque()
        self._rest: deque[tuple[int, ByteSpan]] = deque()
        self._num_reading = 0
        self._bytes_in_flight = 0
        self._busy: _Busy | None = None
        self._busy_time = BusyTime()
        self._closed = False
        self._total_experts = self._total_bytes = self._total_refused = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"pagecache {n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"ReaderThreads({len(self._waiting)} waiting, {len(self._reading)} being read)"

    def totals(self) -> ReaderTotals:
        """Return the counters."""
        return ReaderTotals(self._total_experts, self._total_bytes, self._total_refused)

    def busy_ns(self) -> int:
        """Return how long reads have been in flight so far. From any thread; never waits."""
        return self._busy_time.total_ns(self._recorder.now_ns())

    def read(self, keys: Iterable[ExpertKey], urgency: int) -> None:
        """Queue experts; 0 is most urgent. One that is queued already only becomes more urgent."""
        num_pieces = 0
        with self._changed:
            for key in keys:
                if key not in self._waiting:
                    spans = self._catalog.spans(key)
                    pieces = deque(itertools.chain.from_iterable(map(_pieces, spans)))
                    self._waiting[key] = pieces
                    self._total_experts += 1
                    num_pieces += len(pieces)
                heapq.heappush(self._order, (urgency, next(self._numbers), key))
            self._changed.notify(num_pieces)

    def read_non_expert(self) -> None:
        """Read the non-expert weights."""
        pieces = [(layer, piece) for layer, span in self._all_non_expert for piece in _pieces(span)]
        with self._changed:
            self._non_expert = deque(pieces)
            self._changed.notify(len(pieces))

    def read_rest(self, keys: Iterable[ExpertKey]) -> None:
        """Read experts while nothing else waits, in place of those that were to be read so before."""
        rest: deque[tuple[int, ByteSpan]] = deque(
            (key.layer, piece)
            for key in keys
            for span in self._catalog.spans(key)
            for piece in _pieces(span)
        )
        with self._changed:
            self._rest = rest
            self._changed.notify(len(rest))

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """Let go of experts' pages, before anything else is read."""
        spans = [span for key in keys for span in self._catalog.spans(key)]
        with self._changed:
            self._releases.extend(spans)
            self._changed.notify(len(spans))

    def pending(self, layer: LayerIndex) -> set[ExpertKey]:
        """Return the experts of a layer that are queued or being read."""
        with self._changed:
            return {key for key in (*self._waiting, *self._reading) if key.layer == layer}

    def cancel(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Drop those of `keys` that are queued, partly read ones included; returns them."""
        with self._changed:
            return [key for key in keys if self._waiting.pop(key, None) is not None]

    def close(self) -> None:
        """Drop the queue and end the threads. Blocks for a piece; more calls do nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            key: ExpertKey | None = None
            with self._changed:
                while not self._has_work():
                    self._changed.wait()
                if self._closed:
                    return
                is_release = bool(self._releases)
                if is_release:
                    span = self._releases.popleft()
                elif self._non_expert and not (self._waiting and self._first()[0] <= _URGENT):
                    layer, span = self._non_expert.popleft()
                    self._begin(layer, span)
                elif not self._waiting:
                    layer, span = self._rest.popleft()
                    self._begin(layer, span)
                else:
                    key, span = self._take()
            nbytes = self._move(span, is_release=is_release)
            if not is_release:
                self._finish(key, span, nbytes)

    def _has_work(self) -> bool:
        queues = self._waiting, self._releases, self._non_expert, self._rest
        return self._closed or any(queues)

    def _first(self) -> tuple[int, int, ExpertKey]:
        """Return the most urgent entry of the queue, which is not empty."""
        while self._order[0][2] not in self._waiting:
            heapq.heappop(self._order)
        return self._order[0]

    def _take(self) -> tuple[ExpertKey, ByteSpan]:
        """Return the next piece of an expert."""
        key = self._first()[2]
        pieces = self._waiting[key]
        span = pieces.popleft()
        if not pieces:
            del self._waiting[key]
            heapq.heappop(self._order)
        self._reading[key] += 1
        self._begin(key.layer, span).keys.add(key)
        return key, span

    def _begin(self, layer: int, span: ByteSpan) -> _Busy:
        """Note that a piece is in flight, and return the span in which it is drawn."""
        if self._busy is not None and self._busy.layer != layer:
            self._draw()
        if self._busy is None:
            self._busy = _Busy(layer, self._recorder.now_ns(), set())
            self._busy_time.begin(self._busy.start_ns)
        self._busy.nbytes += span.end - span.start
        self._num_reading += 1
        self._count(span.end - span.start)
        return self._busy

    def _move(self, span: ByteSpan, *, is_release: bool) -> int:
        try:
            return self._advisor.release(span) if is_release else self._advisor.fetch(span)
        except OSError:
            # Compute reads these bytes itself and reports what is wrong with them.
            with self._changed:
                self._total_refused += 1
            return 0

    def _finish(self, key: ExpertKey | None, span: ByteSpan, nbytes: int) -> None:
        with self._changed:
            self._total_bytes += nbytes
            self._count(span.start - span.end)
            if key is not None:
                self._reading[key] -= 1
                if not self._reading[key]:
                    del self._reading[key]
            self._num_reading -= 1
            if not self._num_reading:
                self._draw()

    def _count(self, more_bytes: int) -> None:
        self._bytes_in_flight += more_bytes
        if self._recorder.enabled:
            at_ns = self._recorder.now_ns()
            self._recorder.counter(Name.BYTES_IN_FLIGHT, self._bytes_in_flight, at_ns)

    def _draw(self) -> None:
        busy, self._busy = self._busy, None
        if busy is not None:
            args = {"layer": busy.layer, "experts": len(busy.keys), "bytes": busy.nbytes}
            end_ns = self._recorder.now_ns()
            self._busy_time.end(end_ns)
            self._recorder.span(Lane.PAGECACHE, Name.PREFETCH, busy.start_ns, end_ns, args)


def _pieces(span: ByteSpan) -> Iterator[ByteSpan]:
    for start in range(span.start, span.end, PIECE_BYTES):
        yield ByteSpan(span.shard, start, min(start + PIECE_BYTES, span.end))
