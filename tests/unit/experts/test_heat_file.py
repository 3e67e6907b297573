"""The heat file: what is written is read, only for its own model, whole or not at all, and where it may be."""

from __future__ import annotations

import json
from dataclasses import replace
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
    why_not_kept,
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


def named(home: HeatHome, name: str) -> HeatHome:
    """The home of the same model's heat with --heat-file."""
    with open_model_file(home.model) as file:
        return heat_home(file, read_spec(file), name)


def beside_of(home: HeatHome) -> Path:
    return home.model.with_name(home.model.name + ".heat.json")


@pytest.fixture
def toy(tmp_path, kept_heat):
    """The home of a toy model's heat; `kept_heat` is where the user's cache would be."""
    return home_of(write_toy_model(tmp_path / "toy.gguf", ToyShape()))


def test_what_is_kept_is_found_again(toy, kept_heat):
    """In the user's cache, in four digits; nothing is written beside the model."""
    assert load_heat(toy) is None
    place = keep_heat(toy, record(1 / 3))
    assert place == toy.place == find_heat(toy)
    assert place.parent == kept_heat / "heat"
    assert place.stat().st_size < 1000
    found = load_heat(toy)
    assert found.warmth.tolist() == [[0.3333] * 8] * 2
    assert (found.num_tokens, found.half_life_tokens) == (50, HALF_LIFE)
    assert [entry.name for entry in place.parent.iterdir()] == [place.name]
    assert not beside_of(toy).exists()


def test_what_was_kept_fades_by_what_came(toy):
    """Two runs add up, the first one half after a half-life; another process's run counts as well."""
    keep_heat(toy, replace(record(8.0, 10), repeats=np.array([[4.0, 8.0], [0.0, 8.0]])))
    keep_heat(toy, replace(record(1.0, HALF_LIFE), repeats=np.array([[1.0, 2.0], [2.0, 2.0]])))
    found = load_heat(toy)
    assert found.warmth.tolist() == [[5.0] * 8] * 2
    assert found.repeats.tolist() == [[3.0, 6.0], [2.0, 6.0]]
    assert found.repeat_shares() == (0.5, 1 / 3)
    assert found.num_tokens == 10 + HALF_LIFE


def test_a_file_without_repeats_is_read(toy):
    """Former versions wrote none: nothing is known of them."""
    place = keep_heat(toy, record(1.0))
    body = json.loads(place.read_text())
    del body["repeats"]
    place.write_text(json.dumps(body))
    assert load_heat(toy).warmth.tolist() == [[1.0] * 8] * 2
    assert load_heat(toy).repeat_shares() is None


def test_a_file_of_a_former_version_is_a_start(toy, kept_heat):
    """Beside the model it is read until something is kept, added to that, and never written."""
    beside = beside_of(toy)
    write_heat(beside, toy.identity, record(4.0, 10))
    before = beside.read_bytes()
    assert find_heat(toy) == beside
    assert load_heat(toy).warmth[0, 0] == 4
    assert keep_heat(toy, record(1.0, HALF_LIFE)) == toy.place
    assert (load_heat(toy).warmth[0, 0], load_heat(toy).num_tokens) == (3, 10 + HALF_LIFE)
    assert keep_heat(toy, record(1.0, HALF_LIFE)) == toy.place
    assert load_heat(toy).num_tokens == 10 + 2 * HALF_LIFE
    assert beside.read_bytes() == before
    assert reset_heat(toy) == (toy.place, beside)
    assert load_heat(toy) is None
    assert reset_heat(toy) == ()


def test_a_former_file_that_can_not_be_deleted_is_said(toy, monkeypatch):
    """Forgetting is not pretended."""
    write_heat(beside_of(toy), toy.identity, record(4.0))

    def fail(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(ConfigError, match=r"can not be deleted \(Read-only.*--no-heat"):
        reset_heat(toy)


def test_a_model_that_moves_keeps_its_heat(toy, tmp_path):
    """The folder is not part of the key; another model under the same name has heat of its own."""
    keep_heat(toy, record(5.0))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    moved = home_of(toy.model.rename(folder / "toy.gguf"))
    assert (moved.place, load_heat(moved).warmth[0, 0]) == (toy.place, 5)
    other = home_of(write_toy_model(toy.model, ToyShape(seed=8)))
    assert load_heat(other) is None
    keep_heat(other, record(7.0))
    assert (load_heat(moved).warmth[0, 0], load_heat(other).warmth[0, 0]) == (5, 7)


def test_where_nothing_can_be_written_nothing_is_kept(toy, kept_heat):
    """That is no error, since an answer was given; why is said."""
    assert why_not_kept(toy) is None
    kept_heat.write_text("a file where a folder should be")
    assert keep_heat(toy, record(1.0)) is None
    assert find_heat(toy) is None
    assert "THERMOCLINE_CACHE to another folder or give --heat-file" in why_not_kept(toy)
    assert not beside_of(toy).exists()


def test_a_user_without_a_cache_directory_keeps_nothing(toy, monkeypatch):
    """What was kept beside the model is still read; why nothing is kept is said."""
    monkeypatch.delenv("THERMOCLINE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    home = home_of(toy.model)
    assert (home.place, keep_heat(home, record(1.0))) == (None, None)
    assert "no cache directory: set THERMOCLINE_CACHE" in why_not_kept(home)
    write_heat(beside_of(toy), toy.identity, record(4.0))
    assert load_heat(home).warmth[0, 0] == 4


def test_the_cache_directory_is_where_xdg_says(toy, monkeypatch, tmp_path):
    """XDG_CACHE_HOME if it is absolute, else ~/.cache."""
    monkeypatch.delenv("THERMOCLINE_CACHE")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert home_of(toy.model).place.parent == Path("/c/thermocline/heat")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert home_of(toy.model).place.parent == tmp_path / ".cache/thermocline/heat"


def test_the_built_in_model_never_had_a_file_beside_it(kept_heat):
    """The package is not the user's."""
    home = home_of(Path(DEMO_MODEL_PATH))
    assert home.place.is_relative_to(kept_heat)
    assert home.earlier is None


def test_a_named_file_is_the_only_place(toy, kept_heat, tmp_path, monkeypatch):
    """--heat-file: read, made and written there; neither the cache nor the model's folder counts."""
    keep_heat(toy, record(2.0))
    write_heat(beside_of(toy), toy.identity, record(4.0))
    monkeypatch.chdir(tmp_path)
    home = named(toy, "own.json")
    assert load_heat(home) is None
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert keep_heat(home, record(3.0)) == tmp_path / "own.json"
    assert load_heat(home).warmth[0, 0] == 3
    assert load_heat(toy).warmth[0, 0] == 2
    assert reset_heat(home) == (tmp_path / "own.json",)
    assert load_heat(toy).warmth[0, 0] == 2


def test_a_named_file_that_is_something_else_is_left_alone(toy, tmp_path):
    """It is refused, and neither replaced nor deleted; so is a place where no file can be."""
    notes = tmp_path / "notes.json"
    notes.write_text('{"my": "notes"}')
    home = named(toy, str(notes))
    with pytest.raises(ConfigError, match="no heat file"):
        load_heat(home)
    assert keep_heat(home, record(1.0)) is None
    with pytest.raises(ConfigError, match="no heat file"):
        reset_heat(home)
    assert notes.read_text() == '{"my": "notes"}'
    other = home_of(write_toy_model(tmp_path / "other.gguf", ToyShape(seed=8)))
    write_heat(tmp_path / "other.json", other.identity, record(1.0))
    with pytest.raises(ConfigError, match=r"another model.*name another with --heat-file"):
        load_heat(named(toy, str(tmp_path / "other.json")))
    with pytest.raises(ConfigError, match=r"no folder.*make it"):
        named(toy, str(tmp_path / "none" / "own.json"))
    with pytest.raises(ConfigError, match="no file: name a file"):
        named(toy, str(tmp_path))


def test_a_failed_write_leaves_what_was_there(toy, monkeypatch):
    """Whole or not at all: the old file stays, no part of the new one does."""
    place = keep_heat(toy, record(1.0))

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_heat(place, toy.identity, record(2.0))
    assert read_heat(place)[1].warmth[0, 0] == 1
    assert [entry.name for entry in place.parent.iterdir()] == [place.name]


@pytest.mark.parametrize("change", [{"experts": 16}, {"layers": 3}, {"seed": 8}])
def test_heat_of_another_model_is_refused(toy, change):
    """Beside a model that took the place of another one: of other dimensions, or of other weights in the same."""
    write_heat(beside_of(toy), toy.identity, record(5.0))
    changed = home_of(write_toy_model(toy.model, ToyShape(**change)))
    with pytest.raises(ConfigError, match=r"another model.*heat --reset.*--no-heat"):
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
    write_heat(beside_of(toy), toy.identity, record(4.0))
    assert find_heat(home) == beside_of(toy)
    assert keep_heat(home, record(1.0)) == toy.place


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
        ({"repeats": [[1.0, 2.0], [1.0, 2.0]]}, "repeated choices"),
        ({"repeats": [[3.0, 2.0]]}, "repeated choices"),
        ({"repeats": [[-1.0, 2.0]]}, "no heat file"),
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
