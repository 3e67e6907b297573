"""A mapped file that is cut, written to or replaced: the process lives, and it is told what happened."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.errors import ModelFileError
from thermocline.kernels.native import load_native
from thermocline.modelfile.mapping import MappedFile
from thermocline.modelfile.reader import open_model_file
from thermocline.modelfile.watch import ModelWatch

PAGE = mmap.PAGESIZE
NUM_PAGES = 64
GuardedMap = load_native().GuardedMap


@pytest.fixture
def path(tmp_path):
    """A file of some pages, each filled with its number + 1, and a little more."""
    file = tmp_path / "file"
    pages = np.repeat(np.arange(1, NUM_PAGES + 1, dtype=np.uint8), PAGE)
    file.write_bytes(pages.tobytes() + b"rest")
    return file


@pytest.fixture
def mapped(path):
    """The file, mapped and guarded."""
    return MappedFile(str(path), GuardedMap)


@pytest.mark.parametrize("kept", [0, 1, PAGE, 7 * PAGE + 5, NUM_PAGES * PAGE + 2])
def test_what_a_shorter_file_lacks_is_zeros(path, mapped, kept):
    """Reading any byte of a file that was cut: what is left of it, then zeros, and the change is told for good."""
    assert mapped.change() is None
    before = bytes(mapped.content)
    os.truncate(path, kept)
    assert "size" in mapped.change()
    assert bytes(mapped.content) == before[:kept] + bytes(len(before) - kept)
    told = mapped.change()
    assert ("could not be read" if kept < NUM_PAGES * PAGE else "size") in told
    path.write_bytes(before)
    assert mapped.change() is not None


def test_many_threads_meet_the_end_at_once(path, mapped):
    """Each thread reads each page, in another order, while the file goes: zeros or the page, nothing else."""
    content, found, start = mapped.content, [], threading.Barrier(9)

    def read(seed):
        order = np.random.default_rng(seed).permutation(NUM_PAGES)
        start.wait()
        found.append({int(n): int(content[n * PAGE : (n + 1) * PAGE].max()) for n in order})

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    os.truncate(path, 0)
    for thread in threads:
        thread.join()
    assert all(value in (0, page + 1) for pages in found for page, value in pages.items())
    assert not content.any()


def test_what_is_written_to_or_longer_is_told(path, mapped):
    """One byte in place, and one more at the end."""
    later = MappedFile(str(path), GuardedMap)
    with path.open("r+b") as file:
        file.write(b"x")
    assert mapped.change() == later.change() == "it was written to"
    with path.open("ab") as file:
        file.write(b"x")
    assert later.change() == "its size changed"


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_file_that_was_replaced_by_its_name_is_used_on(path, mapped, is_removed):
    """Another file of that name, or none, changes no byte of the mapping."""
    before = bytes(mapped.content)
    assert not mapped.is_replaced()
    if is_removed:
        path.unlink()
    else:
        other = path.with_name("other")
        other.write_bytes(b"other")
        other.rename(path)
    assert mapped.is_replaced()
    assert mapped.change() is None
    assert bytes(mapped.content) == before


def test_reading_ahead_of_a_shorter_file_is_refused(path, mapped):
    """The kernel's refusal is a number, and it raises no signal."""
    native, size = load_native(), len(mapped.content)
    os.truncate(path, PAGE)
    assert native.fetch_pages(mapped.content, 0, size) in (-errno.EFAULT, -errno.EINVAL)
    assert native.release_pages(mapped.content, 0, size) >= 0


def test_the_guard_goes_with_the_last_view(path):
    """Not before: views outlive the object that mapped the file."""
    released = []

    class Guard:
        def change(self):
            return 0

        def release(self):
            released.append(True)

    mapped = MappedFile(str(path), lambda content, fd: Guard())
    view = mapped.content[5:9]
    del mapped
    gc.collect()
    assert not released
    del view
    gc.collect()
    assert released == [True]


_FAULT = """
import faulthandler, mmap, os, sys
import numpy as np
from thermocline.kernels.native import load_native
from thermocline.modelfile.mapping import MappedFile
path, kind = sys.argv[1:]
if kind == "faulthandler":
    faulthandler.enable()
mapped = MappedFile(path, load_native().GuardedMap)
other = np.memmap(path, np.uint8, "r")
os.truncate(path, 0)
assert not mapped.content.any()
print("alive", flush=True)
if kind == "sent":
    os.kill(os.getpid(), 7)
if kind == "released":
    mapped._guard.release()
    again = np.memmap("/proc/self/exe", np.uint8, "r")
print(other.sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "faulthandler", "released", "sent"])
def test_other_faults_go_where_they_went(path, kind):
    """A fault in a mapping of somebody else's ends the process as before, after faulthandler's report if it is on."""
    ended = subprocess.run(
        [sys.executable, "-c", _FAULT, str(path), kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ended.stdout == "alive\n", ended.stderr
    assert ended.returncode == -signal.SIGBUS
    assert ("Bus error" in ended.stderr) == (kind == "faulthandler")


@pytest.mark.parametrize("kept", [0, 4, 24, 300, 4096])
def test_a_file_that_is_cut_while_it_is_opened_is_refused(tmp_path, kept):
    """Between mapping and header, and a page further: the error says that it changed."""
    path = write_toy_model(tmp_path / "toy.gguf")

    def cut_then_guard(content, fd):
        guard = GuardedMap(content, fd)
        os.truncate(path, kept)
        return guard

    with pytest.raises(ModelFileError, match="changed while it was being opened"):
        open_model_file(path, make_guard=cut_then_guard)


def test_a_watch_keeps_to_the_first_change_and_warns_once(tmp_path, caplog):
    """A replaced file is logged once, a second after; a change stays the same error."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(seed=1))
    now_s = [0.0]
    with open_model_file(path, make_guard=GuardedMap) as file:
        watch = ModelWatch(file, lambda: now_s[0])
        kept = path.with_name("kept")
        os.link(path, kept)
        write_toy_model(path.with_name("new.gguf"), ToyShape(seed=2)).rename(path)
        assert watch.change() is None
        assert not caplog.records
        for now_s[0] in (1.0, 2.0, 3.0):
            assert watch.change() is None
        assert [record.args for record in caplog.records] == [(str(path),)]
        os.truncate(kept, 100)
        first = watch.change()
        assert first.path == str(path)
        assert "size" in first.what
        file.view("token_embd.weight").sum()
        assert watch.change() is first
