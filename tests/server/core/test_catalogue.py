"""Which models folders, lists and the hub's cache have."""

from __future__ import annotations

import os
import shutil

import msgspec
import pytest

from thermocline import EngineConfig
from thermocline.errors import ConfigError
from thermocline.server.core.catalogue import (
    CachedModels,
    JoinedCatalogue,
    ModelFolder,
    ModelList,
    open_catalogue,
)
from thermocline.server.core.model_card import model_card

CONFIG = EngineConfig()


def names(catalogue) -> list[str]:
    """Return the names of the models that there are now."""
    return sorted(model.card.id for model in catalogue.read())


def test_a_folder_s_models_are_called_by_their_paths(tmp_path, small_toy, caplog):
    """Without extension, in subfolders too; what is no model is left out with a line in the log."""
    (tmp_path / "org").mkdir()
    shutil.copy(small_toy, tmp_path / "one.gguf")
    shutil.copy(small_toy, tmp_path / "org" / "two.GGUF")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    (tmp_path / "mmproj-x.gguf").write_bytes(b"GGUF")
    (tmp_path / "half-00001-of-00002.gguf").write_bytes(small_toy.read_bytes())
    (tmp_path / "notes.txt").write_text("no model")
    folder = ModelFolder(tmp_path, CONFIG)
    assert names(folder) == ["one", "org/two"]
    assert "broken" in caplog.text
    card = next(model for model in folder.read() if model.card.id == "one").card
    assert card.architecture == "qwen3moe"
    assert card.num_parameters > 0


def test_a_name_that_is_no_text_can_be_asked_for(tmp_path, small_toy):
    """A file whose name is no UTF-8, or has a line's end: clients get a name that JSON can hold."""
    odd = tmp_path / os.fsdecode(b"m\xff odel\n.gguf")
    shutil.copy(small_toy, odd)
    card = model_card(odd)
    assert card.id == "m\ufffd odel\ufffd"
    assert msgspec.json.decode(msgspec.json.encode(card.id)) == card.id


def test_a_folder_says_once_which_names_can_not_be_shown(tmp_path, small_toy, caplog):
    """The file is left out, and the log says what helps."""
    shutil.copy(small_toy, tmp_path / os.fsdecode(b"m\xff.gguf"))
    shutil.copy(small_toy, tmp_path / "one.gguf")
    folder = ModelFolder(tmp_path, CONFIG)
    assert names(folder) == names(folder) == ["one"]
    assert caplog.text.count("rename it") == 1


def test_a_folder_is_read_anew(tmp_path, small_toy, toy):
    """A file that comes is there, one that changes has its new card, one that goes is gone."""
    shutil.copy(small_toy, tmp_path / "one.gguf")
    folder = ModelFolder(tmp_path, CONFIG)
    (before,) = folder.read()
    shutil.copy(small_toy, tmp_path / "two.gguf")
    assert names(folder) == ["one", "two"]
    shutil.copy(toy, tmp_path / "one.gguf")
    changed = next(model for model in folder.read() if model.card.id == "one")
    assert changed.fingerprint != before.fingerprint
    (tmp_path / "two.gguf").unlink()
    assert names(folder) == ["one"]


def test_a_list_gives_each_model_settings_of_its_own(tmp_path, small_toy):
    """Paths are relative to the list; settings are called as in Python; keep_alive is Ollama's."""
    shutil.copy(small_toy, tmp_path / "one.gguf")
    listed = tmp_path / "models.toml"
    listed.write_text(
        '[models."small:1"]\npath = "one.gguf"\nctx = 32\nkeep-alive = "1h"\n[models.other]\npath = "one.gguf"\n'
        '[models.absent]\npath = "nowhere.gguf"\n'
    )
    catalogue = ModelList(listed, CONFIG)
    assert names(catalogue) == ["other", "small:1"]
    small = next(model for model in catalogue.read() if model.card.id == "small:1")
    assert small.config.memory.max_context_tokens == 32
    assert small.keep_alive_s == 3600.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models = 3", "tables"),
        ("[models.a]\nctx = 3", "path"),
        ('[models.a]\npath = "x.gguf"\nctxx = 3', "ctxx"),
        ('[models.a]\npath = "x.gguf"\nctx = "much"', "ctx"),
        ('[models.a]\npath = "x.gguf"\nkeep_alive = "soon"', "keep_alive"),
        ('[models.a]\npath = "x.gguf"\nkeep_alive = [1]', r"models\.a"),
        ("[models", "can not be read"),
        ("[other]\na = 1", "tables"),
    ],
)
def test_a_list_s_faults_are_named(tmp_path, text, told):
    """ConfigError with the file and the table."""
    listed = tmp_path / "models.toml"
    listed.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        ModelList(listed, CONFIG)
    assert str(listed) in str(caught.value)


def test_no_model_at_all_is_an_error(tmp_path):
    """Unless models may come."""
    with pytest.raises(ConfigError, match="has no model"):
        open_catalogue([tmp_path], CONFIG, with_cache=False)
    with pytest.raises(ConfigError, match="no folder"):
        open_catalogue([tmp_path / "nowhere"], CONFIG, with_cache=False)
    assert open_catalogue([], CONFIG, with_cache=True).read() == CachedModels(CONFIG).read()


def test_of_one_name_the_first_counts(tmp_path, small_toy, toy):
    """Two folders with a file of one name."""
    for folder, model in (("a", small_toy), ("b", toy)):
        (tmp_path / folder).mkdir()
        shutil.copy(model, tmp_path / folder / "same.gguf")
    parts = [ModelFolder(tmp_path / folder, CONFIG) for folder in ("a", "b")]
    (found,) = JoinedCatalogue(parts).read()
    assert found.path.endswith("a/same.gguf")
