"""Disk speed: what is read is let go of before, and nothing is claimed where that fails."""

from __future__ import annotations

import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.calibration import disk_speed
from thermocline.calibration.disk_speed import measure_disk
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ExpertKey
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch import readers
from thermocline.prefetch.advice import PageAdvisor


@pytest.fixture
def opened(tmp_path):
    """A toy file and the catalog of its experts."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(hidden=256, intermediate=256))
    with open_model_file(path) as file:
        yield file, ExpertCatalog(open_model(file, ReferenceKernels()).expert_layers)


def test_everything_read_was_let_go_of_before(opened, monkeypatch):
    """Each piece is released, then read once more."""
    calls, in_huge = [], []
    monkeypatch.setattr(disk_speed, "_resident_share", lambda file, pieces: 0.0)
    monkeypatch.setattr(PageAdvisor, "release", lambda self, span: calls.append(("release", span)))
    fetch = PageAdvisor.fetch

    def noting(self, span, *, in_huge_pages=False):
        calls.append(("fetch", span))
        in_huge.append(in_huge_pages)
        return fetch(self, span, in_huge_pages=in_huge_pages)

    monkeypatch.setattr(PageAdvisor, "fetch", noting)
    found = measure_disk(*opened, num_used=2)
    assert min(found.sequential_bytes_per_s, found.expert_bytes_per_s) > 0
    released = [span for what, span in calls if what == "release"]
    for span in released:
        before, after = calls.index(("fetch", span)), calls.index(("release", span))
        assert before < after
    total = sum(span.end - span.start for span in released)
    _, catalog = opened
    # Five times: all in order, and two of eight experts of each layer.
    assert total == 5 * (catalog.total_bytes + catalog.total_bytes // 4)
    # As prompts read: what is measured in order, once after it was let go of.
    in_order = 5 * sum(
        len(list(readers.pieces_of(span)))
        for layer in catalog.routed_layers
        for span in catalog.layer_spans(layer)
    )
    assert sum(in_huge) == in_order


def test_the_kernel_is_told_of_experts_as_by_prefetch(opened, monkeypatch):
    """No neighbours of a missing page, and huge pages, for every layer's experts, before anything is read."""
    _, catalog = opened
    told = {"stop_read_ahead": [], "allow_huge_pages": []}
    for name, spans in told.items():
        real = getattr(PageAdvisor, name)

        def noting(self, given, spans=spans, real=real):
            spans += given
            return real(self, given)

        monkeypatch.setattr(PageAdvisor, name, noting)
    monkeypatch.setattr(PageAdvisor, "release", lambda self, span: all_told())
    monkeypatch.setattr(disk_speed, "_resident_share", lambda file, pieces: 0.0)
    every = [span for layer in catalog.routed_layers for span in catalog.layer_spans(layer)]

    def all_told() -> int:
        assert told == {"stop_read_ahead": every, "allow_huge_pages": every}
        return 0

    measure_disk(*opened, num_used=2)
    all_told()


def test_a_sample_ends_where_it_is_large_enough(opened, monkeypatch):
    """A large model is not read as a whole."""
    monkeypatch.setattr(disk_speed, "_resident_share", lambda file, pieces: 0.0)
    seen = []
    release = PageAdvisor.release
    monkeypatch.setattr(
        PageAdvisor, "release", lambda self, span: seen.append(span) or release(self, span)
    )
    measure_disk(*opened, num_used=2, sample_bytes=1)
    assert len(seen) == 5 * (1 + 1)


def test_pages_that_stay_are_not_measured(opened, monkeypatch):
    """Another process uses them, or the system knows no such advice."""
    monkeypatch.setattr(disk_speed, "_resident_share", lambda file, pieces: 1.0)
    assert measure_disk(*opened, num_used=2) is None

    def refuse(self, span):
        raise OSError(22, "refused")

    monkeypatch.setattr(PageAdvisor, "release", refuse)
    assert measure_disk(*opened, num_used=2) is None


def test_a_model_without_experts_has_nothing_to_read(opened):
    """Its layers stay in memory."""
    assert measure_disk(opened[0], ExpertCatalog([None, None]), num_used=0) is None


@pytest.mark.parametrize(("share", "pieces"), [(2 / 3, 1), (1 / 4, 4)])
def test_experts_come_in_the_pieces_of_prefetch(opened, monkeypatch, share, pieces):
    """A matrix of less than two pieces is one, as prefetch reads it; a longer one is cut where prefetch cuts it."""
    _, catalog = opened
    layers = catalog.routed_layers
    keys = [ExpertKey.of(layer, n) for layer in layers for n in range(catalog.num_experts)]
    matrices = [span for key in keys for span in catalog.spans(key)]
    stacks = [span for layer in layers for span in catalog.layer_spans(layer)]
    monkeypatch.setattr(readers, "PIECE_BYTES", int((matrices[0].end - matrices[0].start) * share))
    monkeypatch.setattr(disk_speed, "_resident_share", lambda file, pieces: 0.0)
    seen = []
    release = PageAdvisor.release
    monkeypatch.setattr(
        PageAdvisor, "release", lambda self, span: seen.append(span) or release(self, span)
    )
    measure_disk(*opened, num_used=2)
    assert len(list(readers.pieces_of(matrices[0]))) >= pieces
    assert set(seen) <= {piece for span in matrices + stacks for piece in readers.pieces_of(span)}
