"""Prefetch: advice covers exactly the experts' bytes, never on a loop, and hints never wait."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.experts.catalog import ByteSpan, ExpertCatalog
from thermocline.kernels.native import load_native
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex, PrefetchHint
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.governor import PrefetchGovernor
from thermocline.prefetch.residency import ResidencyProbe
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import MemoryRecorder, NullRecorder


@pytest.fixture
def opened(tmp_path):
    """A toy file and the catalog of its experts."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(hidden=256, intermediate=256))
    with open_model_file(path) as file:
        yield file, ExpertCatalog(open_model(file, ReferenceKernels()).expert_layers)


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(LayerIndex(layer), ExpertIndex(expert))


def test_spans_are_the_very_bytes_that_compute_reads(opened):
    """Each span of the catalog equals the matching weight's raw bytes in the file."""
    file, catalog = opened
    for layer in range(2):
        for expert in (0, 3, 7):
            weights = catalog.stack(LayerIndex(layer))[expert]
            spans = catalog.spans(key(layer, expert))
            for weight, span in zip((weights.gate, weights.up, weights.down), spans, strict=True):
                stored = bytes(file.mapping(span.shard)[span.start : span.end])
                assert stored == weight.raw.tobytes()


def hint(layer: int, expert: int) -> PrefetchHint:
    return PrefetchHint(LayerIndex(layer), np.array([expert], np.int32))


def resident_share(mapping: np.ndarray, start: int, end: int) -> float:
    """Return the share of the pages of mapping[start:end] that are in memory, by mincore."""
    address = mapping.ctypes.data
    first = (address + start) // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(address + end - first) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(address + end - first)
    assert libc.mincore(ctypes.c_void_p(first), length, flags) == 0
    return sum(flag & 1 for flag in flags) / num_pages


@pytest.mark.slow
def test_advised_bytes_come_into_memory_all_of_them(tmp_path):
    """Of a file that was dropped from memory, the advised 24 MiB come back, and the rest does not."""
    shape = ToyShape(layers=1, hidden=1024, heads=2, kv_heads=1, experts=16, intermediate=1024)
    path = write_toy_model(tmp_path / "toy.gguf", shape)
    with path.open("rb") as stored:
        os.fsync(stored.fileno())
        os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open_model_file(path) as file:
        mapping = file.mapping(0)
        span = ByteSpan(0, (64 << 20) + 123, (88 << 20) + 5)
        if resident_share(mapping, span.start, span.end) > 0.5:
            pytest.skip("this file system keeps everything in memory")
        advised = PageAdvisor(file).will_need([span])
        assert 0 <= advised - (span.end - span.start) < mmap.PAGESIZE
        for _ in range(500):
            if resident_share(mapping, span.start, span.end) == 1.0:
                break
            threading.Event().wait(0.01)
        assert resident_share(mapping, span.start, span.end) == 1.0
        assert resident_share(mapping, 140 << 20, 180 << 20) < 0.5


def test_advice_asks_for_the_spans_of_the_right_mapping(opened):
    """Each span goes to the native call as it is, with the file's own mapping."""
    file, _ = opened
    calls = []

    def fake(mapping, start, end, piece_bytes):
        calls.append((mapping.ctypes.data, start, end, piece_bytes))
        return end - start

    spans = [ByteSpan(0, 100, 5000), ByteSpan(0, 0, 1)]
    assert PageAdvisor(file, fake).will_need(spans) == 4901
    address = file.mapping(0).ctypes.data
    assert calls == [(address, 100, 5000, 128 << 10), (address, 0, 1, 128 << 10)]


def test_a_refusal_of_the_kernel_is_an_os_error(opened):
    """The error number of the call is kept."""
    advisor = PageAdvisor(opened[0], lambda *_: -errno.EAGAIN)
    with pytest.raises(BlockingIOError):
        advisor.will_need([ByteSpan(0, 0, 1)])


def test_bytes_beyond_the_mapping_are_refused(opened):
    """A span outside of the file never reaches the kernel."""
    nbytes = opened[0].mapping(0).nbytes
    with pytest.raises(ValueError, match="outside"):
        PageAdvisor(opened[0]).will_need([ByteSpan(0, 0, nbytes + 1)])


def test_the_governor_outlives_a_refusal(opened):
    """A refused hint is counted, and the next one is worked off."""
    _, catalog = opened

    class Refusing:
        calls = 0

        def will_need(self, spans):
            self.calls += 1
            if self.calls == 1:
                raise OSError(errno.ENOMEM, "no memory, as told")
            return 7

    governor = PrefetchGovernor(catalog, Refusing(), NullRecorder())
    for expert in (0, 1):
        governor.offer_nowait(hint(0, expert))
    while governor.statistics().total_experts < 1:
        threading.Event().wait(0.001)
    governor.close()
    assert governor.statistics().total_refused == 1
    assert governor.statistics().total_bytes == 7


async def test_advice_refuses_to_block_an_event_loop(opened):
    """On a loop's thread it is an error, not a stall."""
    with pytest.raises(RuntimeError, match="event loop"):
        PageAdvisor(opened[0]).will_need([])


class SlowAdvisor:
    """Blocks in its first call until released, and notes what it was asked for."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.spans: list[ByteSpan] = []

    def will_need(self, spans) -> int:
        self.entered.set()
        self.release.wait(5)
        self.spans += spans
        return sum(span.end - span.start for span in spans)


def test_the_oldest_hints_are_dropped_when_the_kernel_is_slow(opened):
    """Offering never waits; of too many hints the newest survive, and the counters say so."""
    _, catalog = opened
    advisor, recorder = SlowAdvisor(), MemoryRecorder(64)
    governor = PrefetchGovernor(catalog, advisor, recorder, max_hints=2)
    governor.offer_nowait(hint(0, 0))
    assert advisor.entered.wait(5)
    for expert in range(1, 6):
        governor.offer_nowait(hint(0, expert))
    advisor.release.set()
    while governor.statistics().total_experts < 3:
        threading.Event().wait(0.001)
    governor.close()
    expected = [span for expert in (0, 4, 5) for span in catalog.spans(key(0, expert))]
    assert advisor.spans == expected
    statistics = governor.statistics()
    assert (statistics.total_hints, statistics.total_dropped) == (6, 3)
    spans = [event for event in recorder.events() if isinstance(event, SpanEvent)]
    assert {span.lane for span in spans} == {Lane.PAGECACHE}


def test_closing_drops_what_waits(opened):
    """Close does not work off the queue, and can be called twice."""
    governor = PrefetchGovernor(opened[1], SlowAdvisor(), NullRecorder())
    governor.close()
    governor.close()
    assert governor.statistics().total_experts == 0


def test_experts_in_memory_need_no_advice(opened):
    """With every sampled page resident, hints are counted as needless and nothing is advised."""
    file, catalog = opened
    for shard in range(file.num_shards):
        file.mapping(shard).sum()  # reads every page
    probe = ResidencyProbe(file, catalog)
    assert probe.is_resident()
    recorder = MemoryRecorder(64)
    governor = PrefetchGovernor(catalog, PageAdvisor(file), recorder, probe=probe)
    for _ in range(50):
        governor.offer_nowait(hint(0, 0))
    while governor.statistics().total_needless == 0:
        threading.Event().wait(0.001)
    governor.offer_nowait(hint(0, 0))
    governor.close()
    statistics = governor.statistics()
    assert (statistics.total_bytes, statistics.total_experts) == (0, 0)
    assert statistics.total_needless >= 2
    assert recorder.events() == []


def test_a_page_that_is_gone_is_noticed(opened, monkeypatch):
    """One sampled page out of memory is enough to advise again; a refusing kernel is an OSError."""
    probe = ResidencyProbe(*opened)
    monkeypatch.setattr(probe, "_resident_pages", lambda _, offsets: len(offsets) - 1)
    assert not probe.is_resident()
    monkeypatch.setattr(probe, "_resident_pages", lambda *_: -errno.ENOMEM)
    with pytest.raises(OSError, match="memory"):
        probe.is_resident()


def test_bytes_beyond_the_mapping_are_not_looked_at(opened):
    """A mistake of ours is a ValueError at the boundary."""
    mapping = opened[0].mapping(0)
    for offset in (-1, len(mapping)):
        with pytest.raises(ValueError, match="outside"):
            load_native().resident_pages(mapping, np.array([offset], np.int64))
