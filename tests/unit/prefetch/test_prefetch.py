"""Prefetch: advice covers exactly the experts' bytes, never on a loop, and hints never wait."""

from __future__ import annotations

import mmap
import threading

import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.experts.catalog import ByteSpan, ExpertCatalog
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ExpertIndex, ExpertKey, LayerIndex, PrefetchHint
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.governor import PrefetchGovernor
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
            weights = catalog.weights(key(layer, expert))
            spans = catalog.spans(key(layer, expert))
            for weight, span in zip((weights.gate, weights.up, weights.down), spans, strict=True):
                stored = bytes(file.mapping(span.shard)[span.start : span.end])
                assert stored == weight.raw.tobytes()


def test_advice_is_page_aligned_and_covers_the_span(opened, monkeypatch):
    """madvise gets whole pages from the one that holds the first byte, up to the last byte."""
    file, _ = opened
    calls = []

    class FakeMap:
        def madvise(self, option, start, length):
            calls.append((option, start, length))

    advisor = PageAdvisor(file)
    monkeypatch.setattr(advisor, "_maps", [FakeMap()])
    page = mmap.PAGESIZE
    advised = advisor.will_need([ByteSpan(0, page + 100, 3 * page + 5), ByteSpan(0, 0, 1)])
    assert calls == [
        (mmap.MADV_WILLNEED, page, 2 * page + 5),
        (mmap.MADV_WILLNEED, 0, 1),
    ]
    assert advised == 2 * page + 5 + 1


def test_real_advice_is_accepted_by_the_kernel(opened):
    """Every expert's ranges can be advised on the real mapping."""
    file, catalog = opened
    advised = sum(
        PageAdvisor(file).will_need(catalog.spans(key(layer, expert)))
        for layer in range(2)
        for expert in range(8)
    )
    assert advised >= catalog.total_bytes


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
    governor.offer_nowait(PrefetchHint((key(0, 0),)))
    assert advisor.entered.wait(5)
    for expert in range(1, 6):
        governor.offer_nowait(PrefetchHint((key(0, expert),)))
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
