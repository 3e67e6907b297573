"""Files that belong to others: what is in memory and what goes are found out all the same; mincore of their owner is the judge."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.experts.catalog import ByteSpan, ExpertCatalog
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.prefetch import foreign_files
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.foreign_files import ForeignFiles
from thermocline.prefetch.residency import PageLook, ResidencyProbe

_SHAPE = ToyShape(layers=2, hidden=256, intermediate=256)
_PAGE = mmap.PAGESIZE


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A toy file that counts as another user's, of which nothing is in memory, and its experts."""
    monkeypatch.setattr(foreign_files, "_is_ours", lambda _: False)
    path = write_toy_model(tmp_path / "toy.gguf", _SHAPE)
    with open_model_file(path) as file:
        catalog = ExpertCatalog(open_model(file, ReferenceKernels()).expert_layers)
        drop(path, file.mapping(0))
        if any(in_memory(file.mapping(0))):
            pytest.skip("this file system keeps everything in memory")
        # A page that is missing comes alone, as experts are mapped.
        PageAdvisor(file).stop_read_ahead([ByteSpan(0, 0, len(file.mapping(0)))])
        yield file, catalog


def drop(path: Path, mapping) -> None:
    """Take all pages of a file out of memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(len(mapping))
    assert libc.madvise(ctypes.c_void_p(mapping.ctypes.data), length, mmap.MADV_DONTNEED) == 0
    with path.open("rb") as stored:
        os.fsync(stored.fileno())
        os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(mapping) -> list[bool]:
    """Return which pages are in memory, as the kernel tells the owner."""
    num_pages = -(-len(mapping) // _PAGE)
    flags = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(len(mapping))
    assert libc.mincore(ctypes.c_void_p(mapping.ctypes.data), length, flags) == 0
    return [bool(flag & 1) for flag in flags]


def test_a_look_finds_what_is_in_memory(opened) -> None:
    """Of each page, as mincore finds it; a look at one that is missing brings no neighbour."""
    file, catalog = opened
    span = catalog.layer_spans(catalog.routed_layers[0])[0]
    PageAdvisor(file).fetch(ByteSpan(span.shard, span.start, span.start + 3 * _PAGE))
    before = in_memory(file.mapping(0))
    look = PageLook(file)
    assert 0 in look.foreign
    # The last page first: one that is missing has come by the time of the next look.
    pages = range(len(before))[::-7]
    assert [look.count(0, [page * _PAGE]) for page in pages] == [before[page] for page in pages]
    looked_at = set(pages)
    after = in_memory(file.mapping(0))
    others = [page for page in range(len(before)) if page not in looked_at]
    assert [after[page] for page in others] == [before[page] for page in others]


def test_released_pages_leave_memory(opened) -> None:
    """Those inside the span, but for a few that the kernel is busy with; what is read again has the file's bytes."""
    file, _ = opened
    mapping, advisor = file.mapping(0), PageAdvisor(file)
    stored = mapping.tobytes()
    assert all(in_memory(mapping))
    released = advisor.release(ByteSpan(0, 3 * _PAGE + 1, 105 * _PAGE + 5))
    assert released == 101 * _PAGE
    gone = {page for page, here in enumerate(in_memory(mapping)) if not here}
    assert gone <= set(range(4, 105))
    assert len(gone) > 90
    assert mapping.tobytes() == stored


def test_the_probe_says_when_all_is_in_memory(opened) -> None:
    """Not before it is, however often it looks, and then until something goes."""
    file, catalog = opened
    probe = ResidencyProbe(file, catalog)
    for _ in range(20):
        assert not probe.is_resident()
    # A look brings the page that it found missing, and no other.
    assert sum(in_memory(file.mapping(0))) <= 20
    file.mapping(0).sum()
    assert probe.is_resident()
    span = catalog.layer_spans(catalog.routed_layers[0])[0]
    PageAdvisor(file).release(span)
    assert not probe.is_resident()


def test_a_file_that_was_replaced_is_not_looked_at(opened, tmp_path) -> None:
    """The path's new file says nothing about the pages of the old one."""
    file, catalog = opened
    write_toy_model(tmp_path / "new.gguf", _SHAPE).rename(tmp_path / "toy.gguf")
    foreign, probe = ForeignFiles(file), ResidencyProbe(file, catalog)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(FileNotFoundError, match="another file by now"):
            foreign.descriptor(0)
        with pytest.raises(FileNotFoundError):
            probe.is_resident()
    # The governor asks twice a second for as long as it runs.
    assert len(list(Path("/proc/self/fd").iterdir())) == before


_AS_NOBODY = """
import mmap, os, sys
import numpy as np
from thermocline.kernels.native import load_native
from thermocline.modelfile.reader import open_model_file
from thermocline.prefetch.advice import PageAdvisor
from thermocline.prefetch.residency import PageLook
from thermocline.experts.catalog import ByteSpan
load_native()  # what another user's Python may not read is imported before
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with open_model_file(sys.argv[1]) as file:
    look, advisor, whole = PageLook(file), PageAdvisor(file), ByteSpan(0, 0, len(file.mapping(0)))
    pages = range(0, len(file.mapping(0)), 4096)
    advisor.stop_read_ahead([whole])  # as experts are mapped
    for _ in range(2):
        advisor.fetch(whole)
        print(look.count(0, pages) == len(pages))
        advisor.release(whole)
        told = look._resident_pages(file.mapping(0), np.array(pages, np.int64))
        print(told == len(pages), look.count(0, pages) < len(pages) / 20)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_finds_out_and_lets_go() -> None:
    """A process that is not the owner's: mincore tells it that all is in memory, when nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = write_toy_model(Path(folder) / "toy.gguf", _SHAPE)
        path.chmod(0o644)
        with open_model_file(path) as file:
            drop(path, file.mapping(0))
            if any(in_memory(file.mapping(0))):
                pytest.skip("this file system keeps everything in memory")
        command = [sys.executable, "-c", _AS_NOBODY, os.fspath(path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True"] * 6
