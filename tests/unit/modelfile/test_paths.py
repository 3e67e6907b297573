"""What is no readable model file is a typed error at once: devices, pipes, loops, missing shards."""

from __future__ import annotations

import os
import shutil
import threading

import numpy as np
import pytest

from tests.support.gguf_files import write_gguf, write_shards
from thermocline.errors import ModelFileError
from thermocline.modelfile.reader import open_model_file


def weights(*shape):
    return np.ones(shape, dtype=np.float32)


PARTS = [[("a", "F32", weights(8))], [("b", "F32", weights(8))], [("c", "F32", weights(8))]]


def test_missing_file(tmp_path):
    """The path is named, and the advice is to check it."""
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf.*can not be read.*check the path"):
        open_model_file(tmp_path / "nowhere.gguf")


def test_directory(tmp_path):
    """A directory is not a model."""
    with pytest.raises(ModelFileError, match="this is a directory, no file"):
        open_model_file(tmp_path)


def test_fifo_without_a_writer_does_not_hang(tmp_path):
    """A pipe is refused at once: it is never waited for."""
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    errors = []

    def attempt():
        try:
            open_model_file(fifo)
        except ModelFileError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert "a pipe, socket or device" in errors[0]


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_device(device):
    """An endless or empty device is refused without a read."""
    with pytest.raises(ModelFileError, match="a pipe, socket or device, no file"):
        open_model_file(device)


def test_symlink_loop(tmp_path):
    """Links in a circle are a typed error."""
    (tmp_path / "a.gguf").symlink_to("b.gguf")
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    with pytest.raises(ModelFileError, match="can not be read"):
        open_model_file(tmp_path / "a.gguf")


def test_symlink_to_a_model_opens(tmp_path):
    """A link is followed, as in the caches of download tools."""
    write_gguf(tmp_path / "blob", {}, PARTS[0])
    (tmp_path / "m.gguf").symlink_to("blob")
    with open_model_file(tmp_path / "m.gguf") as model:
        assert "a" in model.tensors


def test_empty_file(tmp_path):
    """An empty file says so instead of failing to map."""
    path = tmp_path / "empty.gguf"
    path.touch()
    with pytest.raises(ModelFileError, match="at byte 0: the file is empty"):
        open_model_file(path)


def test_unreadable_file(tmp_path, monkeypatch):
    """A file that this user may not read says which right is missing."""
    path = write_gguf(tmp_path / "m.gguf", {}, PARTS[0])

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # a mode would not stop the superuser
    with pytest.raises(ModelFileError, match=r"Permission denied.*chmod"):
        open_model_file(path)


@pytest.mark.parametrize("path", ["a\x00b.gguf", "x" * 5000, ""])
def test_impossible_path(path):
    """A path that no file can have is a typed error too."""
    with pytest.raises(ModelFileError, match="can not be read"):
        open_model_file(path)


def test_path_below_a_file(tmp_path):
    """A file used as a folder is a typed error."""
    path = write_gguf(tmp_path / "m.gguf", {}, PARTS[0])
    with pytest.raises(ModelFileError, match="can not be read"):
        open_model_file(path / "inside.gguf")


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, "m", {"toy.depth": 2}, PARTS)


def test_missing_shard_is_named(shards):
    """The error lists the shards to download."""
    shards[1].unlink()
    shards[2].unlink()
    with pytest.raises(ModelFileError, match=r"missing: .*00002-of-00003\.gguf, .*00003-of-00003"):
        open_model_file(shards[0])


def test_renamed_shard_is_told_its_name(shards, tmp_path):
    """A shard whose name lost its number says which ending it must have."""
    renamed = shards[1].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"name must end in -00002-of-00003\.gguf"):
        open_model_file(renamed)


def test_renumbered_shard(shards):
    """Two shards that swapped names are found out, whichever is opened."""
    spare = shards[0].with_name("spare")
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    with pytest.raises(
        ModelFileError, match="the name says shard 2 of 3, the content shard 3 of 3"
    ):
        open_model_file(shards[0])
    with pytest.raises(
        ModelFileError, match=r"shard 3 of 3, so that its name must end in -00003-of"
    ):
        open_model_file(shards[1])


def test_shard_copied_over_another(shards):
    """The same shard twice is a typed error."""
    shutil.copy(shards[1], shards[2])
    with pytest.raises(
        ModelFileError, match="the name says shard 3 of 3, the content shard 2 of 3"
    ):
        open_model_file(shards[0])


def test_shard_of_a_set_of_another_size(shards, tmp_path):
    """A shard of a two-file split among those of a three-file split is found out."""
    (tmp_path / "other").mkdir()
    other = write_shards(tmp_path / "other", "m", {}, PARTS[:2])
    shutil.copy(other[1], shards[1])
    with pytest.raises(
        ModelFileError, match="the name says shard 2 of 3, the content shard 2 of 2"
    ):
        open_model_file(shards[0])


def test_whole_model_among_shards(shards):
    """A file that is no shard under a shard's name is found out."""
    write_gguf(shards[2], {}, PARTS[2])
    with pytest.raises(ModelFileError, match="the name says shard 3 of 3, the content no shard"):
        open_model_file(shards[0])


def test_shard_of_a_model_with_more_tensors(shards, tmp_path):
    """A shard from a split of another model is found out by the number of tensors."""
    (tmp_path / "other").mkdir()
    other = write_shards(tmp_path / "other", "m", {}, [PARTS[0], PARTS[1], PARTS[2] * 0])
    shutil.copy(other[1], shards[1])
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count differs"):
        open_model_file(shards[0])


def test_shard_of_another_architecture(shards, tmp_path):
    """A shard of a model of another architecture is found out."""
    (tmp_path / "other").mkdir()
    other = write_shards(tmp_path / "other", "m", {}, PARTS, arch="toy2")
    shutil.copy(other[1], shards[1])
    with pytest.raises(ModelFileError, match=r"general\.architecture differs"):
        open_model_file(shards[0])


def test_tensor_in_two_shards(tmp_path):
    """The same tensor in two shards is a typed error that names both."""
    paths = write_shards(tmp_path, "m", {}, [PARTS[0], PARTS[0]])
    with pytest.raises(ModelFileError, match=r"00002-of-00002.*'a' is also in .*00001-of-00002"):
        open_model_file(paths[0])


def test_too_few_tensors_in_all_shards(tmp_path):
    """A set that holds fewer tensors than it declares is not complete."""
    metadata = {"split.no": 0, "split.count": 2, "split.tensors.count": 3}
    for index in range(2):
        path = tmp_path / f"m-{index + 1:05d}-of-00002.gguf"
        write_gguf(path, {**metadata, "split.no": index}, PARTS[index])
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count is 3, but .* hold 2 tensors"):
        open_model_file(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ({"split.no": 3, "split.count": 3}, "shard 3 .from 0. of 3"),
        ({"split.no": -1, "split.count": 3}, "shard -1 .from 0. of 3"),
        ({"split.no": 0, "split.count": -2}, "shard 0 .from 0. of -2"),
        ({"split.no": 0, "split.count": 4_000_000_000}, "of 4000000000"),
        ({"split.count": 3}, "'split.no' is missing"),
        ({"split.no": 0, "split.count": "3"}, "'split.count' is STRING, expected an integer"),
        ({"split.no": 0.0, "split.count": 3}, "'split.no' is FLOAT32, expected an integer"),
    ],
)
def test_impossible_split_numbers(tmp_path, split, says):
    """Split numbers that make no sense are refused before any other file is looked for."""
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", split, PARTS[0])
    with pytest.raises(ModelFileError, match=says):
        open_model_file(path)


def test_damaged_shard_is_named(shards):
    """The error of a broken shard names that shard, not the one that was opened."""
    shards[2].write_bytes(shards[2].read_bytes()[:-20])
    with pytest.raises(ModelFileError) as caught:
        open_model_file(shards[0])
    assert caught.value.path == str(shards[2])
