"""The heat file: what is written is read, only for its own model, whole or not at all, and where it may be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.errors import ConfigError
from thermocline.experts.heat import HeatRecord
from thermocline.experts.heat_file import (
    find_heat,
    heat_places,
    identify,
    is_heat_file,
    keep_heat,
    load_heat,
    read_heat,
    reset_heat,
    write_heat,
)
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec

HALF_LIFE = 100


def record(value: float, num_tokens: int = 50) -> HeatRecord:
    return HeatRecord(np.full((2, 8), value), num_tokens, HALF_LIFE)


@pytest.fixture
def toy(tmp_path, kept_heat):
    """An open toy model and its identity; `kept_heat` is where the user's cache would be."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape())
    with open_model_file(path) as file:
        yield file, identify(file, read_spec(file))


def test_what_is_kept_is_found_again(toy):
    """Beside the model, in four digits."""
    file, identity = toy
    assert load_heat(file, identity) is None
    place = keep_heat(file, identity, record(1 / 3))
    assert place == Path(file.path + ".heat.json") == find_heat(file, identity)
    assert place.stat().st_size < 1000
    found = load_heat(file, identity)
    assert found.warmth.tolist() == [[0.3333] * 8] * 2
    assert (found.num_tokens, found.half_life_tokens) == (50, HALF_LIFE)
    assert {entry.name for entry in place.parent.iterdir()} == {"toy.gguf", place.name}


def test_what_was_kept_fades_by_what_came(toy):
    """Two runs add up, the first one half after a half-life; another process's run counts as well."""
    file, identity = toy
    keep_heat(file, identity, record(8.0, 10))
    keep_heat(file, identity, record(1.0, HALF_LIFE))
    found = load_heat(file, identity)
    assert found.warmth.tolist() == [[5.0] * 8] * 2
    assert found.num_tokens == 10 + HALF_LIFE


def test_where_the_folder_can_not_be_written_the_cache_is_used(toy, kept_heat):
    """And what is there is found, until something newer is beside the model."""
    file, identity = toy
    beside = Path(file.path + ".heat.json")
    beside.mkdir()  # nothing can be put in its place
    place = keep_heat(file, identity, record(3.0))
    assert place.parent == kept_heat / "heat"
    assert load_heat(file, identity).warmth[0, 0] == 3
    assert [entry.name for entry in beside.parent.iterdir() if "partial" in entry.name] == []
    beside.rmdir()
    write_heat(beside, identity, record(4.0))
    os.utime(place, ns=(0, 0))
    assert load_heat(file, identity).warmth[0, 0] == 4
    assert reset_heat(file, identity) == (beside, place)
    assert load_heat(file, identity) is None
    assert reset_heat(file, identity) == ()


def test_where_nothing_can_be_written_nothing_is_kept(toy, kept_heat):
    """That is no error: an answer was given."""
    file, identity = toy
    Path(file.path + ".heat.json").mkdir()
    kept_heat.write_text("a file where a folder should be")
    assert keep_heat(file, identity, record(1.0)) is None


def test_a_user_without_a_home_has_one_place(toy, monkeypatch):
    """Beside the model."""
    file, identity = toy
    monkeypatch.delenv("THERMOCLINE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert heat_places(file, identity) == (Path(file.path + ".heat.json"),)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert heat_places(file, identity)[1].is_relative_to("/c/thermocline/heat")


def test_the_built_in_model_is_not_written_beside(kept_heat):
    """The package is not the user's."""
    with open_model_file(DEMO_MODEL_PATH) as file:
        (place,) = heat_places(file, identify(file, read_spec(file)))
    assert place.is_relative_to(kept_heat)


def test_a_failed_write_leaves_what_was_there(toy, monkeypatch):
    """Whole or not at all: the old file stays, no part of the new one does."""
    file, identity = toy
    place = keep_heat(file, identity, record(1.0))

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_heat(place, identity, record(2.0))
    assert read_heat(place)[1].warmth[0, 0] == 1
    assert sorted(entry.name for entry in place.parent.iterdir()) == ["toy.gguf", place.name]


@pytest.mark.parametrize("change", [{"experts": 16}, {"layers": 3}, {"seed": 8}])
def test_heat_of_another_model_is_refused(toy, change):
    """Of other dimensions, and of other weights in the same dimensions; keeping replaces it."""
    file, identity = toy
    keep_heat(file, identity, record(5.0))
    other = write_toy_model(Path(file.path).with_name("toy.gguf"), ToyShape(**change))
    with open_model_file(other) as opened:
        changed = identify(opened, read_spec(opened))
        with pytest.raises(ConfigError, match=r"another model.*heat --reset"):
            load_heat(opened, changed)
        fresh = HeatRecord(np.ones((changed.num_layers, changed.num_experts)), 7, HALF_LIFE)
        keep_heat(opened, changed, fresh)
        assert load_heat(opened, changed).num_tokens == 7


BODY = {
    "format": "thermocline-heat",
    "version": 1,
    "model": {
        "name": "m",
        "architecture": "a",
        "num_layers": 1,
        "num_experts": 2,
        "digest": "d",
    },
    "half_life_tokens": 10,
    "num_tokens": 3,
    "heat": [[1.0, 2.0]],
}


def test_the_form_is_plain_json(tmp_path):
    """Anybody can write it."""
    path = tmp_path / "h.json"
    path.write_text(json.dumps(BODY))
    assert is_heat_file(path)
    identity, found = read_heat(path)
    assert (identity.digest, found.warmth.tolist()) == ("d", [[1.0, 2.0]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "no heat file"),
        ({"heat": [[1.0]]}, "other layers or experts"),
        ({"heat": [[1.0, 2.0], [1.0, 2.0]]}, "other layers or experts"),
        ({"heat": [[1.0, -2.0]]}, "no heat file"),
        ({"heat": [[1.0, None]]}, "no heat file"),
        ({"heat": [[1.0, 1e300]]}, "no heat file"),
        ({"heat": []}, "other layers or experts"),
        ({"num_tokens": -1}, "no heat file"),
        ({"half_life_tokens": 0}, "no heat file"),
        ({"model": {}}, "no heat file"),
    ],
)
def test_what_is_not_a_heat_file_is_refused(tmp_path, change, says):
    """With one line that says what and where."""
    path = tmp_path / "h.json"
    path.write_text(json.dumps(BODY | change))
    with pytest.raises(ConfigError, match=says):
        read_heat(path)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_damaged_bytes_are_refused(tmp_path, raw):
    """Cut off, binary, deeply nested."""
    path = tmp_path / "h.json"
    path.write_bytes(raw)
    assert not is_heat_file(path)
    with pytest.raises(ConfigError, match="no heat file"):
        read_heat(path)


def test_what_can_not_be_read_is_said(tmp_path):
    """A file that is not there."""
    assert not is_heat_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="can not be read"):
        read_heat(tmp_path / "none")
