"""Bytes of spilt parts: what comes back is what was written, or it does not come back."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from thermocline.errors import ConfigError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.recurrent_contract import StateShape
from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.kv.recurrent import StatePool
from thermocline.kv.spill_index import (
    CHECKSUM_BYTES,
    Demotion,
    PartCopy,
    PartKey,
    PartKind,
    SpillPlace,
)
from thermocline.kv.spill_store import PartBytes, SpillStore
from thermocline.messages import LayerIndex

ROOM = 1 << 16


@pytest.fixture(params=[CacheType.F16, CacheType.Q8_0], ids=str)
def cache(request):
    """Two layers of which the second has a window, and a recurrent one; random numbers everywhere."""
    heads = [HeadShape(2, 32), HeadShape(1, 64), HeadShape(2, 32)]
    own = {LayerIndex(1): 4, LayerIndex(2): 0}
    kv = KVPool(heads, 6, 4, request.param, own_blocks=own)
    states = StatePool(3, {LayerIndex(2): StateShape((3, 5), (2, 4, 4))})
    rng = np.random.default_rng(1)
    for layer in kv.layers:
        for array in (kv.layer(layer).keys, kv.layer(layer).values):
            array[:] = rng.integers(0, 256, array.shape, np.uint8)
    states.layer(LayerIndex(2)).conv[:] = rng.normal(size=(3, 3, 5))
    states.layer(LayerIndex(2)).recurrent[:] = rng.normal(size=(3, 2, 4, 4))
    return SequenceCache(kv, states)


@pytest.fixture
def parts(cache):
    return PartBytes(cache, [LayerIndex(1)])


def contents(parts: PartBytes, kind: PartKind, number: int) -> bytes:
    return b"".join(bytes(view) for view in parts.views(kind, number))


def clear(parts: PartBytes, kind: PartKind, number: int) -> None:
    for view in parts.views(kind, number):
        view[:] = bytes(view.nbytes)


def copy_of(parts: PartBytes, kind: PartKind, number: int, offset: int = 64, level: int = 0):
    size = parts.num_bytes(kind) + CHECKSUM_BYTES
    return PartCopy(PartKey(kind, b"key"), number, SpillPlace(level, offset, size))


@pytest.fixture(params=["memory", "file"])
def store(request, parts, tmp_path):
    memory = request.param == "memory"
    with SpillStore(parts, ROOM if memory else 0, None if memory else str(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("kind", PartKind)
def test_a_part_comes_back_as_it_was_into_another_place(parts, store, kind):
    """Every byte of it, and nothing beside it."""
    expected, beside = contents(parts, kind, 1), contents(parts, kind, 0)
    assert len(expected) == parts.num_bytes(kind) > 0
    copy = copy_of(parts, kind, 1)
    store.save(copy)
    clear(parts, kind, 1)
    assert store.load(copy._replace(number=2))
    assert contents(parts, kind, 2) == expected
    assert contents(parts, kind, 0) == beside
    assert not any(contents(parts, kind, 1))


def test_the_file_has_no_name(parts, tmp_path):
    """So nothing is left of it, however the process ends, and only this user could open it."""
    with SpillStore(parts, 0, str(tmp_path)) as store:
        store.save(copy_of(parts, PartKind.BLOCK, 0))
        assert list(tmp_path.iterdir()) == []
        facts = os.fstat(store._file.descriptor)
        assert (facts.st_nlink, facts.st_mode & 0o777) == (0, 0o600)
        assert facts.st_size == 64 + parts.num_bytes(PartKind.BLOCK) + CHECKSUM_BYTES
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(store._file.descriptor)


def test_without_nameless_files_the_name_goes_at_once(parts, tmp_path, monkeypatch):
    """Not every file system has them."""
    monkeypatch.delattr(os, "O_TMPFILE")
    with SpillStore(parts, 0, str(tmp_path)) as store:
        assert list(tmp_path.iterdir()) == []
        copy = copy_of(parts, PartKind.STATE, 1)
        store.save(copy)
        assert store.load(copy)


def test_changed_bytes_are_no_part(parts, tmp_path):
    """One bit of the part, of its checksum, or the part of another key."""
    with SpillStore(parts, 0, str(tmp_path)) as store:
        copy = copy_of(parts, PartKind.BLOCK, 1)
        store.save(copy)
        assert not store.load(copy._replace(key=PartKey(PartKind.BLOCK, b"other")))
        assert not store.load(copy._replace(key=PartKey(PartKind.WINDOW, b"key"), number=1))
        descriptor = store._file.descriptor
        for offset in (64, 64 + parts.num_bytes(PartKind.BLOCK)):
            (before,) = os.pread(descriptor, 1, offset)
            os.pwrite(descriptor, bytes([before ^ 1]), offset)
            assert not store.load(copy)
            os.pwrite(descriptor, bytes([before]), offset)
            assert store.load(copy)


def test_a_file_that_was_cut_is_an_error(parts, tmp_path):
    """The caller takes the part for lost."""
    with SpillStore(parts, 0, str(tmp_path)) as store:
        copy = copy_of(parts, PartKind.BLOCK, 1)
        store.save(copy)
        os.ftruncate(store._file.descriptor, copy.place.num_bytes)
        with pytest.raises(OSError, match="ends before"):
            store.load(copy)


def test_a_part_goes_on_from_memory_to_the_file(parts, tmp_path):
    """With a checksum, which memory has none of."""
    with SpillStore(parts, ROOM, str(tmp_path)) as store:
        copy = copy_of(parts, PartKind.BLOCK, 3)
        expected = contents(parts, PartKind.BLOCK, 3)
        store.save(copy)
        target = copy.place._replace(level=1, offset=8)
        store.demote(Demotion(copy.key, copy.place, target))
        clear(parts, PartKind.BLOCK, 3)
        assert store.load(copy._replace(place=target))
        assert contents(parts, PartKind.BLOCK, 3) == expected


def test_many_pieces_take_several_calls(parts, tmp_path, monkeypatch):
    """The system takes so many pieces at a time, and may write fewer bytes than it was given."""
    monkeypatch.setattr("thermocline.kv.spill_store._MAX_VECTORS", 2)
    write, calls = os.pwritev, []

    def some(descriptor, views, offset):
        calls.append(len(views))
        return write(descriptor, [views[0][:17]], offset)

    monkeypatch.setattr(os, "pwritev", some)
    with SpillStore(parts, 0, str(tmp_path)) as store:
        copy = copy_of(parts, PartKind.BLOCK, 1)
        store.save(copy)
        assert store.load(copy)
        assert max(calls) == 2 < len(calls)


def test_a_full_disk_is_an_error(parts, tmp_path, monkeypatch):
    """The caller goes on without the part."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with SpillStore(parts, 0, str(tmp_path)) as store, pytest.raises(OSError, match="No space"):
        store.save(copy_of(parts, PartKind.BLOCK, 1))


def test_a_folder_that_takes_no_file_is_refused(parts, tmp_path):
    """With the flag's name and the system's reason."""
    with pytest.raises(ConfigError, match=r"--cache-spill-dir .*No such file"):
        SpillStore(parts, 0, str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        SpillStore(parts, 0, str(tmp_path / "file"))
