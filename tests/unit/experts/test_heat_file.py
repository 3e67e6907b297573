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
    HeatHome,
    find_heat,
    heat_home,
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


def home_of(path: Path) -> HeatHome:
    with open_model_file(path) as file:
        return heat_home(file, read_spec(file))


def beside_of(home: HeatHome) -> Path:
    return home.model.with_name(home.model.name + ".heat.json")


@pytest.fixture
def toy(tmp_path, kept_heat):
    """The home of a toy model's heat; `kept_heat` is where the user's cache would be."""
    return home_of(write_toy_model(tmp_path / "toy.gguf", ToyShape()))


def test_what_is_kept_is_found_again(toy):
    """Beside the model, in four digits."""
    assert load_heat(toy) is None
    place = keep_heat(toy, record(1 / 3))
    assert place == beside_of(toy) == find_heat(toy)
    assert place.stat().st_size < 1000
    found = load_heat(toy)
    assert found.warmth.tolist() == [[0.3333] * 8] * 2
    assert (found.num_tokens, found.half_life_tokens) == (50, HALF_LIFE)
    assert {entry.name for entry in place.parent.iterdir()} == {"toy.gguf", place.name}


def test_what_was_kept_fades_by_what_came(toy):
    """Two runs add up, the first one half after a half-life; another process's run counts as well."""
    keep_heat(toy, record(8.0, 10))
    keep_heat(toy, record(1.0, HALF_LIFE))
    found = load_heat(toy)
    assert found.warmth.tolist() == [[5.0] * 8] * 2
    assert found.num_tokens == 10 + HALF_LIFE


def test_where_the_folder_can_not_be_written_the_cache_is_used(toy, kept_heat):
    """And what is there is found, until something newer is beside the model."""
    beside = beside_of(toy)
    beside.mkdir()  # nothing can be put in its place
    place = keep_heat(toy, record(3.0))
    assert place.parent == kept_heat / "heat"
    assert load_heat(toy).warmth[0, 0] == 3
    assert [entry.name for entry in beside.parent.iterdir() if "partial" in entry.name] == []
    beside.rmdir()
    write_heat(beside, toy.identity, record(4.0))
    os.utime(place, ns=(0, 0))
    assert load_heat(toy).warmth[0, 0] == 4
    assert reset_heat(toy) == (beside, place)
    assert load_heat(toy) is None
    assert reset_heat(toy) == ()


def test_where_nothing_can_be_written_nothing_is_kept(toy, kept_heat):
    """That is no error: an answer was given."""
    beside_of(toy).mkdir()
    kept_heat.write_text("a file where a folder should be")
    assert keep_heat(toy, record(1.0)) is None


def test_a_user_without_a_home_has_one_place(toy, monkeypatch):
    """Beside the model."""
    monkeypatch.delenv("THERMOCLINE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert home_of(toy.model).places == (beside_of(toy),)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert home_of(toy.model).places[1].is_relative_to("/c/thermocline/heat")


def test_the_built_in_model_is_not_written_beside(kept_heat):
    """The package is not the user's."""
    (place,) = home_of(Path(DEMO_MODEL_PATH)).places
    assert place.is_relative_to(kept_heat)


def test_a_failed_write_leaves_what_was_there(toy, monkeypatch):
    """Whole or not at all: the old file stays, no part of the new one does."""
    place = keep_heat(toy, record(1.0))

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_heat(place, toy.identity, record(2.0))
    assert read_heat(place)[1].warmth[0, 0] == 1
    assert sorted(entry.name for entry in place.parent.iterdir()) == ["toy.gguf", place.name]


@pytest.mark.parametrize("change", [{"experts": 16}, {"layers": 3}, {"seed": 8}])
def test_heat_of_another_model_is_refused(toy, change):
    """Of other dimensions, and of other weights in the same dimensions; keeping replaces it."""
    keep_heat(toy, record(5.0))
    changed = home_of(write_toy_model(toy.model, ToyShape(**change)))
    with pytest.raises(ConfigError, match=r"another model.*heat --reset"):
        load_heat(changed)
    fresh = HeatRecord(np.ones((changed.identity.num_layers, changed.identity.num_experts)), 7, 1)
    keep_heat(changed, fresh)
    assert load_heat(changed).num_tokens == 7


def test_the_home_does_not_move_with_the_process(toy, monkeypatch, tmp_path):
    """A relative path means where the process was when the model was opened."""
    monkeypatch.chdir(toy.model.parent)
    home = home_of(Path(toy.model.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert keep_heat(home, record(1.0)) == beside_of(toy)


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
