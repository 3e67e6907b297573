"""Page calls: exactly the experts' bytes, whole pages, never on an event loop, refusals as OSError."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.experts.catalog import ByteSpan, ExpertCatalog
from thermocline.kernels.native import load_native
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.residency import ResidencyProbe


@pytest.fixture
def opened(tmp_path):
    """A toy file and the catalog of its experts."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(hidden=256, intermediate=256))
    with open_model_file(path) as file:
        yield file, ExpertCatalog(open_model(file, ReferenceKernels()).expert_layers)


class FakeCalls:
    """Stands in for the compiled core: notes every call, and answers `answer` or the bytes."""

    def __init__(self, answer: int | None = None) -> None:
        self.calls: list[tuple[str, int, int, int]] = []
        self._answer = answer

    def _note(self, name, mapping, start, end):
        self.calls.append((name, mapping.ctypes.data, start, end))
        return end - start if self._answer is None else self._answer

    def fetch_pages(self, mapping, start, end):
        return self._note("fetch", mapping, start, end)

    def fetch_huge_pages(self, mapping, start, end):
        return self._note("huge", mapping, start, end)

    def allow_huge_pages(self, mapping, start, end):
        return self._note("allow", mapping, start, end)

    def release_pages(self, mapping, start, end):
        return self._note("release", mapping, start, end)

    def unmap_pages(self, mapping, start, end):
        return self._note("unmap", mapping, start, end)

    def stop_read_ahead(self, mapping, start, end):
        return self._note("stop", mapping, start, end)


def test_spans_are_the_very_bytes_that_compute_reads(opened):
    """Each span of the catalog equals the matching weight's raw bytes in the file."""
    file, catalog = opened
    for layer in range(2):
        for expert in (0, 3, 7):
            key = ExpertKey(LayerIndex(layer), ExpertIndex(expert))
            weights = catalog.stack(LayerIndex(layer))[expert]
            spans = catalog.spans(key)
            for weight, span in zip((weights.gate, weights.up, weights.down), spans, strict=True):
                stored = bytes(file.mapping(span.shard)[span.start : span.end])
                assert stored == weight.raw.tobytes()
            assert sum(span.end - span.start for span in spans) == catalog.expert_bytes(
                LayerIndex(layer)
            )


def test_a_layers_spans_hold_all_its_experts(opened):
    """The first expert begins where the layer's span begins, and the last ends where it ends."""
    _, catalog = opened
    whole = catalog.layer_spans(LayerIndex(1))
    first = catalog.spans(ExpertKey(LayerIndex(1), ExpertIndex(0)))
    last = catalog.spans(ExpertKey(LayerIndex(1), ExpertIndex(catalog.num_experts - 1)))
    assert [span.start for span in whole] == [span.start for span in first]
    assert [span.end for span in whole] == [span.end for span in last]


def test_each_call_gets_the_span_of_the_right_mapping(opened):
    """Fetching, releasing and stopping read-ahead pass the span on as it is."""
    file, _ = opened
    calls = FakeCalls()
    advisor = PageAdvisor(file, calls)
    assert advisor.fetch(ByteSpan(0, 100, 5000)) == 4900
    assert advisor.release(ByteSpan(0, 0, 1)) == 1
    advisor.stop_read_ahead([ByteSpan(0, 2, 3), ByteSpan(0, 4, 6)])
    advisor.allow_huge_pages([ByteSpan(0, 7, 8)])
    assert advisor.fetch(ByteSpan(0, 9, 11), in_huge_pages=True) == 2
    address = file.mapping(0).ctypes.data
    assert calls.calls == [
        ("fetch", address, 100, 5000),
        ("release", address, 0, 1),
        ("stop", address, 2, 3),
        ("stop", address, 4, 6),
        ("allow", address, 7, 8),
        ("huge", address, 9, 11),
    ]


def test_where_the_kernel_has_no_huge_pages_all_is_read_by_pages(opened):
    """Also what was to come with its neighbours: page after page would take a hundred times as long."""
    calls = FakeCalls(-errno.EINVAL)
    advisor = PageAdvisor(opened[0], calls)
    with pytest.raises(OSError, match="Invalid"):
        advisor.allow_huge_pages([ByteSpan(0, 0, 1)])
    with pytest.raises(OSError, match="Invalid"):
        advisor.fetch(ByteSpan(0, 2, 3), in_huge_pages=True)
    assert [name for name, *_ in calls.calls] == ["allow", "fetch"]


def test_a_refusal_of_the_kernel_is_an_os_error(opened):
    """The error number of every call is kept."""
    advisor = PageAdvisor(opened[0], FakeCalls(-errno.EAGAIN))
    span = ByteSpan(0, 0, 1)
    for call in (advisor.fetch, advisor.release, lambda span: advisor.stop_read_ahead([span])):
        with pytest.raises(BlockingIOError):
            call(span)


def test_bytes_beyond_the_mapping_are_refused(opened):
    """A span outside of the file never reaches the kernel."""
    nbytes = opened[0].mapping(0).nbytes
    advisor = PageAdvisor(opened[0])
    for call in (advisor.fetch, advisor.release, lambda span: advisor.stop_read_ahead([span])):
        with pytest.raises(ValueError, match="outside"):
            call(ByteSpan(0, 0, nbytes + 1))


async def test_advice_refuses_to_block_an_event_loop(opened):
    """On a loop's thread, reading and releasing are errors, not stalls."""
    await asyncio.sleep(0)
    advisor = PageAdvisor(opened[0], FakeCalls())
    for call in (advisor.fetch, advisor.release):
        with pytest.raises(RuntimeError, match="event loop"):
            call(ByteSpan(0, 0, 1))


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


@pytest.fixture
def dropped(tmp_path):
    """A file of 200 MB, of which nothing is in memory where its file system allows that."""
    shape = ToyShape(layers=1, hidden=1024, heads=2, kv_heads=1, experts=16, intermediate=1024)
    path = write_toy_model(tmp_path / "toy.gguf", shape)
    with path.open("rb") as stored:
        os.fsync(stored.fileno())
        os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.mark.slow
def test_fetched_bytes_are_in_memory_and_released_ones_are_not(dropped):
    """Of a file that was dropped from memory exactly the fetched bytes come back, and they go again."""
    with open_model_file(dropped) as file:
        mapping, advisor = file.mapping(0), PageAdvisor(file)
        span = ByteSpan(0, (64 << 20) + 123, (88 << 20) + 5)
        if resident_share(mapping, span.start, span.end) > 0.5:
            pytest.skip("this file system keeps everything in memory")
        read = advisor.fetch(span)
        assert 0 <= read - (span.end - span.start) < 2 * mmap.PAGESIZE
        assert resident_share(mapping, span.start, span.end) == 1.0
        assert resident_share(mapping, 140 << 20, 180 << 20) < 0.5
        released = advisor.release(span)
        assert 0 <= (span.end - span.start) - released < 2 * mmap.PAGESIZE
        assert resident_share(mapping, span.start, span.end) < 0.1


@pytest.mark.slow
def test_parts_of_huge_pages_go_alone(dropped):
    """They come with few waits where the kernel has huge pages, and a release of half a one leaves the other half."""
    with open_model_file(dropped) as file:
        mapping, advisor = file.mapping(0), PageAdvisor(file)
        whole = ByteSpan(0, 64 << 20, 80 << 20)
        if resident_share(mapping, whole.start, whole.end) > 0.5:
            pytest.skip("this file system keeps everything in memory")
        advisor.stop_read_ahead([whole])
        try:
            advisor.allow_huge_pages([whole])
        except OSError:
            pytest.skip("this kernel has no huge pages")
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        assert advisor.fetch(whole, in_huge_pages=True) == whole.end - whole.start
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before < 2 * 16 + 4
        assert resident_share(mapping, whole.start, whole.end) == 1.0
        gone = ByteSpan(0, (66 << 20) + (1 << 19), (70 << 20) + (1 << 18))
        advisor.release(gone)
        assert resident_share(mapping, gone.start, gone.end) < 0.1
        assert resident_share(mapping, 66 << 20, gone.start) == 1.0
        assert resident_share(mapping, gone.end, whole.end) == 1.0


_ONE_PAGE_OF_TWO_MIB = """
import ctypes, mmap, sys
import numpy as np
from thermocline.kernels.native import load_native
native, mib = load_native(), 1 << 20
file = np.memmap(sys.argv[1], np.uint8, "r").view(np.ndarray)
libc = ctypes.CDLL(None)
whole = ctypes.c_void_p(file.ctypes.data), ctypes.c_size_t(len(file))
libc.madvise(*whole, mmap.MADV_RANDOM)
pages = np.arange(0, 2 * mib, mmap.PAGESIZE)
is_there = lambda start: native.resident_pages(file, start + pages)
print(is_there(64 * mib), is_there(72 * mib))
libc.madvise(*whole, mmap.MADV_HUGEPAGE)
file[65 * mib].copy()
allowed = native.allow_huge_pages(file, 0, len(file))
native.fetch_huge_pages(file, 73 * mib, 73 * mib + 1)
print(is_there(64 * mib), is_there(72 * mib), allowed > 0)
"""


@pytest.mark.slow
def test_huge_pages_come_where_the_kernel_gives_them(dropped):
    """Of one byte as much as comes by a plain use of it with the same advice. In a process of its own, which has not given up."""
    command = [sys.executable, "-c", _ONE_PAGE_OF_TWO_MIB, os.fspath(dropped)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    before, after = (line.split() for line in ran.stdout.splitlines())
    if before != ["0", "0"] or after[0] == "1":
        pytest.skip(
            "this file system keeps everything in memory, or this kernel gives no huge pages"
        )
    assert after[1:] == [after[0], "True"]


_NO_HUGE_PAGES = """
import ctypes, mmap, resource, sys
import numpy as np
from thermocline.kernels.native import load_native
native, mib = load_native(), 1 << 20
file = np.memmap(sys.argv[1], np.uint8, "r").view(np.ndarray)
ctypes.CDLL(None).madvise(ctypes.c_void_p(file.ctypes.data), ctypes.c_size_t(len(file)), mmap.MADV_RANDOM)
for start in (64 * mib, 72 * mib):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    assert native.fetch_huge_pages(file, start, start + mib) == mib
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before)
"""


@pytest.mark.slow
def test_where_single_pages_come_huge_ones_are_given_up(dropped):
    """As from a kernel that takes the advice and does not follow it: the first piece comes page by page, the next as before."""
    command = [sys.executable, "-c", _NO_HUGE_PAGES, os.fspath(dropped)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, then = map(int, ran.stdout.split())
    if first < 100:
        pytest.skip(
            "this file system keeps everything in memory, or gives more than a page unasked"
        )
    assert then < first / 3


def test_a_span_within_one_page_is_fetched_and_never_released(opened):
    """Fetching rounds out to whole pages, releasing rounds in: neighbours' bytes stay."""
    advisor = PageAdvisor(opened[0])
    assert advisor.fetch(ByteSpan(0, 10, 20)) == mmap.PAGESIZE
    assert advisor.release(ByteSpan(0, 10, 20)) == 0
    assert advisor.fetch(ByteSpan(0, 10, 10)) in (0, mmap.PAGESIZE)


def test_a_file_that_is_read_is_resident(opened):
    """With every page read the probe says so."""
    file, catalog = opened
    file.mapping(0).sum()
    assert ResidencyProbe(file, catalog).is_resident()


def test_a_page_that_is_gone_is_noticed(opened, monkeypatch):
    """One sampled page out of memory is enough to read ahead; a refusing kernel is an OSError."""
    probe = ResidencyProbe(*opened)
    monkeypatch.setattr(probe._look, "_resident_pages", lambda _, offsets: len(offsets) - 1)
    assert not probe.is_resident()
    monkeypatch.setattr(probe._look, "_resident_pages", lambda *_: -errno.ENOMEM)
    with pytest.raises(OSError, match="memory"):
        probe.is_resident()


def test_bytes_beyond_the_mapping_are_not_looked_at(opened):
    """A mistake of ours is a ValueError at the boundary."""
    mapping = opened[0].mapping(0)
    for offset in (-1, len(mapping)):
        with pytest.raises(ValueError, match="outside"):
            load_native().resident_pages(mapping, np.array([offset], np.int64))
