"""The speed cache: found again for the same machine, file and settings, and for no other."""

from __future__ import annotations

import os

import pytest

from tests.support.speeds import speeds
from thermocline.calibration.speed_cache import cached_speeds, keep_speeds, speeds_place


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file that stands for a model, and a cache folder of its own."""
    monkeypatch.setenv("THERMOCLINE_CACHE", os.fspath(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_speeds_are_found_again(model):
    """What was kept comes back, and lies in the cache folder."""
    assert cached_speeds([model], "2 threads") is None
    place = keep_speeds([model], "2 threads", speeds())
    assert place is not None
    assert place.parent.parent.name == "cache"
    assert cached_speeds([model], "2 threads") == speeds()
    assert [each.name for each in place.parent.iterdir()] == [place.name]


def test_another_file_or_setting_has_speeds_of_its_own(model):
    """A changed file, another number of threads, another machine."""
    keep_speeds([model], "2 threads", speeds())
    assert cached_speeds([model], "1 threads") is None
    model.write_bytes(b"other weights")
    assert cached_speeds([model], "2 threads") is None


def test_a_path_that_is_no_text_has_speeds_too(model):
    """File names are bytes."""
    odd = model.rename(model.with_name(os.fsdecode(b"m\xff odel\n.gguf")))
    keep_speeds([odd], "", speeds())
    assert cached_speeds([odd], "") == speeds()


def test_broken_speeds_are_measured_again(model):
    """A damaged file is as good as none."""
    place = keep_speeds([model], "", speeds())
    for content in (b"\xff", b"{", b"[]"):
        place.write_bytes(content)
        assert cached_speeds([model], "") is None


def test_a_cache_that_can_not_be_written_is_no_error(model, tmp_path, monkeypatch):
    """Speeds are then measured each time; so they are for a user without a home."""
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("THERMOCLINE_CACHE", os.fspath(blocked))
    assert keep_speeds([model], "", speeds()) is None
    monkeypatch.delenv("THERMOCLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "xdg"))
    assert speeds_place([model], "").is_relative_to(tmp_path / "xdg" / "thermocline")
