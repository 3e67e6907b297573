"""Reader threads: most urgent first, each expert once, bounded on their way, and quick to close."""

from __future__ import annotations

import errno
import itertools
import threading
import time

import pytest

from thermocline.experts.catalog import ByteSpan
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex
from thermocline.prefetch.readers import PIECE_BYTES, ReaderThreads
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import MemoryRecorder, NullRecorder


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(LayerIndex(layer), ExpertIndex(expert))


class FakeCatalog:
    """Every expert is one span whose start tells who it is."""

    def __init__(self, nbytes: int = 10) -> None:
        self._nbytes = nbytes

    def spans(self, key):
        start = (key.layer * 100 + key.expert) * (1 << 30)
        return (ByteSpan(0, start, start + self._nbytes),)


class GatedAdvisor:
    """Lets one read through per `release_one`, and notes whom it was asked for, in order."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.asked: list[tuple[str, int]] = []
        self.in_huge_pages: list[int] = []
        self.entered = threading.Semaphore(0)
        self._gate = threading.Semaphore(1_000_000 if is_open else 0)
        self.error: OSError | None = None

    def _move(self, what, span) -> int:
        self.asked.append((what, span.start >> 30))
        self.entered.release()
        assert self._gate.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        return span.end - span.start

    def fetch(self, span, *, in_huge_pages=False) -> int:
        if in_huge_pages:
            self.in_huge_pages.append(span.start >> 30)
        return self._move("fetch", span)

    def release(self, span) -> int:
        return self._move("release", span)

    def let(self, count: int) -> None:
        self._gate.release(count)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=10)


@pytest.fixture
def advisor():
    """A disk whose reads end when the test says so; all of them end with the test."""
    gated = GatedAdvisor()
    yield gated
    gated.let(1_000_000)


def start(advisor, *, threads: int = 1, nbytes: int = 10, recorder=None) -> ReaderThreads:
    return ReaderThreads(FakeCatalog(nbytes), advisor, recorder or NullRecorder(), threads)


def fetched(advisor) -> list[int]:
    return [who for what, who in advisor.asked if what == "fetch"]


def test_the_most_urgent_is_read_first_and_equals_in_order(advisor):
    """Urgency decides, then the order of asking; what is on its way is not interrupted."""
    readers = start(advisor)
    readers.read([key(0, 0)], 5)
    advisor.wait_for(1)
    readers.read([key(2, 1), key(2, 2)], 2)
    readers.read([key(1, 1)], 1)
    readers.read([key(0, 1)], 0)
    advisor.let(5)
    advisor.wait_for(4)
    assert fetched(advisor) == [0, 1, 101, 201, 202]
    readers.close()


def test_the_rest_is_read_in_pieces_while_nothing_else_waits(advisor):
    """Whatever is asked for goes first, also between two pieces; another rest takes the place of this one."""
    readers = start(advisor, nbytes=2 * PIECE_BYTES)
    readers.read_rest([key(3, 0), key(3, 1)])
    advisor.wait_for(1)
    readers.read([key(0, 1)], 9)
    advisor.let(4)
    advisor.wait_for(4)
    assert fetched(advisor) == [300, 1, 1, 300, 301]
    readers.read_rest([key(2, 2)])
    advisor.let(10)
    advisor.wait_for(2)
    readers.close()
    assert fetched(advisor) == [300, 1, 1, 300, 301, 202, 202]


def test_a_rest_can_be_called_off(advisor):
    """Nothing of it is read any more, but for the piece on its way."""
    readers = start(advisor)
    readers.read_rest([key(3, 0), key(3, 1)])
    advisor.wait_for(1)
    readers.read_rest([])
    readers.read([key(0, 1)], 0)
    advisor.let(10)
    advisor.wait_for(1)
    readers.close()
    assert fetched(advisor) == [300, 1]


class NotedCondition(threading.Condition):
    """Counts the threads that it wakes."""

    woken = 0

    def notify(self, n: int = 1) -> None:
        self.woken += min(n, len(self._waiters))
        super().notify(n)

    def wait_for_waiters(self, count: int) -> None:
        end_s = time.monotonic() + 10
        while len(self._waiters) < count:
            assert time.monotonic() < end_s


def test_no_more_threads_wake_than_have_something_to_do(advisor, monkeypatch):
    """Each that wakes takes a lock, and the interpreter's, from compute."""
    monkeypatch.setattr("thermocline.prefetch.readers.threading.Condition", NotedCondition)
    readers = start(advisor, threads=4)
    condition = readers._changed
    condition.wait_for_waiters(4)
    readers.read([], 0)
    readers.release([])
    readers.read_rest([])
    assert condition.woken == 0
    readers.read([key(0, 1)], 0)
    assert condition.woken == 1
    advisor.wait_for(1)
    readers.read([key(0, 2), key(0, 3)], 0)
    assert condition.woken == 3
    advisor.wait_for(2)
    advisor.let(3)
    readers.close()


def test_an_expert_waits_once_and_can_become_urgent(advisor):
    """Asked for again it moves to the front, and is read once."""
    readers = start(advisor)
    readers.read([key(0, 0)], 0)
    advisor.wait_for(1)
    readers.read([key(1, 1), key(1, 2)], 1)
    readers.read([key(1, 2)], 0)
    advisor.let(10)
    advisor.wait_for(2)
    readers.read([key(3, 3)], 0)
    advisor.wait_for(1)
    assert fetched(advisor) == [0, 102, 101, 303]
    assert readers.totals().total_experts == 4
    readers.close()


def test_what_waits_can_be_cancelled_what_is_read_can_not(advisor):
    """Cancelling answers which were still waiting, and they are never read."""
    readers = start(advisor)
    readers.read([key(0, 0), key(0, 1), key(0, 2)], 0)
    advisor.wait_for(1)
    assert readers.pending(LayerIndex(0)) == {key(0, 0), key(0, 1), key(0, 2)}
    assert readers.cancel([key(0, 0), key(0, 1), key(9, 9)]) == [key(0, 1)]
    advisor.let(2)
    advisor.wait_for(1)
    assert fetched(advisor) == [0, 2]
    readers.close()


def test_large_experts_go_in_pieces_and_threads_bound_what_is_on_its_way(advisor):
    """Of an expert of ten pieces two threads have two pieces on their way, none longer than a piece."""
    readers = start(advisor, threads=2, nbytes=10 * PIECE_BYTES)
    readers.read([key(0, 0)], 0)
    advisor.wait_for(2)
    assert not advisor.entered.acquire(blocking=False)
    advisor.let(10)
    advisor.wait_for(8)
    readers.close()
    assert readers.totals().total_bytes == 10 * PIECE_BYTES


@pytest.mark.parametrize(("nbytes", "num_reads"), [(2 * PIECE_BYTES - 1, 1), (2 * PIECE_BYTES, 2)])
def test_what_has_less_than_two_pieces_is_read_at_once(advisor, nbytes, num_reads):
    """Wherever it lies in the file."""
    readers = start(advisor, nbytes=nbytes)
    readers.read([key(0, 0), key(0, 1)], 0)
    advisor.let(2 * num_reads)
    advisor.wait_for(2 * num_reads)
    readers.close()
    assert fetched(advisor) == [0] * num_reads + [1] * num_reads


def test_non_expert_weights_go_before_the_experts_behind_them(advisor):
    """Attention comes before a layer's experts; those of this layer and the next go before what later layers need."""
    catalog = FakeCatalog()
    non_expert = [(layer, *catalog.spans(key(9, layer))) for layer in (0, 2)]
    readers = ReaderThreads(catalog, advisor, NullRecorder(), 1, non_expert=non_expert)
    readers.read([key(0, 0)], 5)
    advisor.wait_for(1)
    readers.read_non_expert()
    readers.read([key(2, 0)], 2)
    readers.read([key(1, 0)], 1)
    advisor.let(5)
    advisor.wait_for(4)
    assert fetched(advisor) == [0, 900, 100, 902, 200]
    readers.close()
    assert readers.totals().total_experts == 3


def test_releases_go_before_reads(advisor):
    """Room is made before it is filled."""
    readers = start(advisor)
    readers.read([key(0, 0), key(0, 1)], 0)
    advisor.wait_for(1)
    readers.release([key(5, 5)])
    advisor.let(3)
    advisor.wait_for(2)
    assert advisor.asked == [("fetch", 0), ("release", 505), ("fetch", 1)]
    readers.close()


def test_experts_side_by_side_are_released_as_one(advisor):
    """A huge page that they share is let go whole; cut at multiples of 8 MiB, so that none is cut in two."""
    released = []

    def release(span) -> int:
        released.append((span.start, span.end))
        return 0

    advisor.release = release
    advisor.let(100)
    readers = ReaderThreads(RowOfExperts(3 << 20), advisor, NullRecorder(), 1)
    readers.release([key(0, 3), key(0, 1), key(0, 2), key(0, 6)])
    readers.read([key(0, 0)], 0)
    advisor.wait_for(1)
    readers.close()
    mib = 1 << 20
    assert released == [(3 * mib, 8 * mib), (8 * mib, 12 * mib), (18 * mib, 21 * mib)]


class RowOfExperts:
    """Each expert begins where the one before it ends."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def spans(self, key):
        return (ByteSpan(0, key.expert * self._nbytes, (key.expert + 1) * self._nbytes),)


def test_what_has_its_neighbours_wanted_is_read_in_huge_pages(advisor):
    """Experts of a prompt that streams, all that has room, and large weights that are no experts'."""
    advisor.let(100)
    catalog = FakeCatalog()
    large, small = ByteSpan(0, 700 << 30, (700 << 30) + (4 << 20)), *catalog.spans(key(8, 1))
    readers = ReaderThreads(
        catalog, advisor, NullRecorder(), 1, non_expert=[(0, large), (0, small)]
    )
    readers.read([key(0, 0)], 0)
    readers.read([key(0, 1)], 0, with_neighbours=True)
    advisor.wait_for(2)
    readers.read_rest([key(3, 0), key(4, 0)], with_neighbours={3})
    advisor.wait_for(2)
    readers.read_non_expert()
    advisor.wait_for(5)
    readers.close()
    assert advisor.in_huge_pages == [1, 300, *[700] * 4]
    assert sorted(set(fetched(advisor)) - set(advisor.in_huge_pages)) == [0, 400, 801]


def test_closing_waits_for_one_piece_only(advisor):
    """With a slow disk and a long queue, close ends after the piece that is on its way."""
    readers = start(advisor, nbytes=50 * PIECE_BYTES)
    readers.read([key(0, n) for n in range(50)], 0)
    advisor.wait_for(1)
    closing = threading.Thread(target=readers.close)
    closing.start()
    advisor.let(1)
    closing.join(10)
    assert not closing.is_alive()
    assert len(advisor.asked) <= 2
    readers.close()


def test_a_refusal_is_counted_and_the_next_piece_is_read(advisor):
    """A kernel that refuses costs nothing but that piece."""
    advisor.error = OSError(errno.ENOMEM, "no memory, as told")
    readers = start(advisor)
    readers.read([key(0, 0)], 0)
    advisor.let(1)
    advisor.wait_for(1)
    readers.read([key(0, 1)], 0)
    advisor.wait_for(1)
    assert readers.totals().total_refused == 1
    advisor.error = None
    advisor.let(1)
    readers.read([key(0, 2)], 0)
    advisor.wait_for(1)
    readers_closed(readers, advisor)
    assert readers.totals().total_bytes > 0


def readers_closed(readers, advisor) -> None:
    advisor.let(100)
    readers.close()


def test_the_lane_is_busy_while_reads_run_and_never_twice(advisor):
    """Spans are the time of reads, one layer each, do not overlap, and tell experts and bytes."""
    recorder = MemoryRecorder(100)
    readers = start(advisor, threads=2, recorder=recorder)
    readers.read([key(0, 0), key(0, 1)], 0)
    advisor.wait_for(2)
    advisor.let(2)
    readers.read([key(1, 0)], 0)
    advisor.wait_for(1)
    readers_closed(readers, advisor)
    spans = [event for event in recorder.events() if isinstance(event, SpanEvent)]
    assert {span.lane for span in spans} == {Lane.PAGECACHE}
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
    assert sum(span.args["bytes"] for span in spans) == 30
    assert [span.args["layer"] for span in spans] == sorted(span.args["layer"] for span in spans)
    assert sum(span.args["experts"] for span in spans if span.args["layer"] == 0) == 2


def test_nothing_is_drawn_while_nothing_is_read(advisor):
    """Waiting threads and releases leave the lane empty."""
    recorder = MemoryRecorder(100)
    readers = start(advisor, recorder=recorder)
    readers.release([key(0, 0)])
    advisor.let(1)
    advisor.wait_for(1)
    readers.close()
    assert recorder.events() == []
