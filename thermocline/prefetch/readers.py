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
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from thermocline.experts.catalog import ByteSpan
from thermocline.traces.busy import BusyTime
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from typing import Protocol

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.messages import ExpertKey, LayerIndex
    from thermocline.traces.recorder import Recorder

    class Advisor(Protocol):
        def fetch(self, span: ByteSpan, *, in_huge_pages: bool = False) -> int:
            """Read the pages of `span`. in_huge_pages: and of its neighbours, which are wanted as well."""
            ...

        def release(self, span: ByteSpan) -> int:
            """Let go of the pages of `span`."""
            ...


# Measured on a virtual disk (docs/LOG.md): four reads of 1 MiB reach what the disk gives. What has less than two of them,
# as most experts' matrices, is one piece: each costs the interpreter time that compute wants.
PIECE_BYTES = 1 << 20
NUM_THREADS = 4
# Experts of this urgency or a higher one go before non-expert weights of later layers.
_URGENT = 1
# Non-expert weights of at least so many bytes are read in huge pages.
_MANY_BYTES = 4 << 20
# Let go of at a time: whole huge pages, since half a one stays.
_RELEASED_BYTES = 8 << 20


class _Piece(NamedTuple):
    """What one call reads. in_huge_pages: with its neighbours. key: the expert of which it is, if it was asked for by name."""

    span: ByteSpan
    layer: int
    in_huge_pages: bool
    key: ExpertKey | None = None

    @property
    def nbytes(self) -> int:
        return self.span.end - self.span.start


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
        self._waiting: dict[ExpertKey, deque[_Piece]] = {}
        self._reading: Counter[ExpertKey] = Counter()
        self._releases: deque[ByteSpan] = deque()
        self._non_expert: deque[_Piece] = deque()
        self._rest: deque[_Piece] = deque()
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

    def read(
        self, keys: Iterable[ExpertKey], urgency: int, *, with_neighbours: bool = False
    ) -> None:
        """Queue experts; 0 is most urgent. One that is queued already only becomes more urgent.

        with_neighbours: those beside them in the file are wanted as well, or nearly all of them.
        """
        num_pieces = 0
        with self._changed:
            for key in keys:
                if key not in self._waiting:
                    pieces = deque(
                        _Piece(part, key.layer, with_neighbours, key)
                        for span in self._catalog.spans(key)
                        for part in pieces_of(span)
                    )
                    self._waiting[key] = pieces
                    self._total_experts += 1
                    num_pieces += len(pieces)
                heapq.heappush(self._order, (urgency, next(self._numbers), key))
            self._changed.notify(num_pieces)

    def read_non_expert(self) -> None:
        """Read the non-expert weights."""
        pieces = [
            _Piece(part, layer, in_huge_pages=is_read_in_huge_pages(span))
            for layer, span in self._all_non_expert
            for part in pieces_of(span)
        ]
        with self._changed:
            self._non_expert = deque(pieces)
            self._changed.notify(len(pieces))

    def read_rest(self, keys: Iterable[ExpertKey], *, with_neighbours: Container[int] = ()) -> None:
        """Read experts while nothing else waits, in place of those that were to be read so before.

        with_neighbours: layers nearly all of whose experts are wanted.
        """
        rest = deque(
            _Piece(part, key.layer, in_huge_pages=key.layer in with_neighbours)
            for key in keys
            for span in self._catalog.spans(key)
            for part in pieces_of(span)
        )
        with self._changed:
            self._rest = rest
            self._changed.notify(len(rest))

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """Let go of experts' pages, before anything else is read."""
        spans = _joined(span for key in keys for span in self._catalog.spans(key))
        parts = [part for span in spans for part in _parts(span, _RELEASED_BYTES)]
        with self._changed:
            self._releases.extend(parts)
            self._changed.notify(len(parts))

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
            with self._changed:
                while not self._has_work():
                    self._changed.wait()
                if self._closed:
                    return
                task = self._releases.popleft() if self._releases else self._take()
            if isinstance(task, _Piece):
                fetch = partial(self._advisor.fetch, task.span, in_huge_pages=task.in_huge_pages)
                self._finish(task, self._try(fetch))
            else:
                self._try(partial(self._advisor.release, task))

    def _has_work(self) -> bool:
        queues = self._waiting, self._releases, self._non_expert, self._rest
        return self._closed or any(queues)

    def _first(self) -> tuple[int, int, ExpertKey]:
        """Return the most urgent entry of the queue, which is not empty."""
        while self._order[0][2] not in self._waiting:
            heapq.heappop(self._order)
        return self._order[0]

    def _take(self) -> _Piece:
        """Return the next piece, now in flight."""
        if self._non_expert and self._is_non_expert_first(self._non_expert[0].layer):
            piece = self._non_expert.popleft()
        elif not self._waiting:
            piece = self._rest.popleft()
        else:
            key = self._first()[2]
            pieces = self._waiting[key]
            piece = pieces.popleft()
            if not pieces:
                del self._waiting[key]
                heapq.heappop(self._order)
            self._reading[key] += 1
        self._begin(piece)
        return piece

    def _is_non_expert_first(self, layer: int) -> bool:
        """Whether non-expert weights of `layer` come before the first expert: attention comes before them."""
        if not self._waiting:
            return True
        urgency, _, key = self._first()
        return urgency > _URGENT or layer <= key.layer

    def _begin(self, piece: _Piece) -> None:
        """Note that a piece is in flight."""
        if self._busy is not None and self._busy.layer != piece.layer:
            self._draw()
        if self._busy is None:
            self._busy = _Busy(piece.layer, self._recorder.now_ns(), set())
            self._busy_time.begin(self._busy.start_ns)
        if piece.key is not None:
            self._busy.keys.add(piece.key)
        self._busy.nbytes += piece.nbytes
        self._num_reading += 1
        self._count(piece.nbytes)

    def _try(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except OSError:
            # Compute reads these bytes itself and reports what is wrong with them.
            with self._changed:
                self._total_refused += 1
            return 0

    def _finish(self, piece: _Piece, nbytes: int) -> None:
        with self._changed:
            self._total_bytes += nbytes
            self._count(-piece.nbytes)
            if piece.key is not None:
                self._reading[piece.key] -= 1
                if not self._reading[piece.key]:
                    del self._reading[piece.key]
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


def is_read_in_huge_pages(span: ByteSpan) -> bool:
    """Whether weights that are no experts' are read with their neighbours: few of these are others."""
    return span.end - span.start >= _MANY_BYTES


def pieces_of(span: ByteSpan) -> Iterator[ByteSpan]:
    """Cut a span into what is read at a time."""
    if span.end - span.start < 2 * PIECE_BYTES:
        return iter((span,))
    return _parts(span, PIECE_BYTES)


def _parts(span: ByteSpan, nbytes: int) -> Iterator[ByteSpan]:
    """Cut a span at multiples of `nbytes` in the file."""
    start = span.start
    while start < span.end:
        end = min((start // nbytes + 1) * nbytes, span.end)
        yield ByteSpan(span.shard, start, end)
        start = end


def _joined(spans: Iterable[ByteSpan]) -> list[ByteSpan]:
    """Return the same bytes in as few spans as hold them."""
    found: list[ByteSpan] = []
    for span in sorted(spans, key=lambda each: (each.shard, each.start)):
        if found and (found[-1].shard, found[-1].end) == (span.shard, span.start):
            found[-1] = ByteSpan(span.shard, found[-1].start, span.end)
        else:
            found.append(span)
    return found
