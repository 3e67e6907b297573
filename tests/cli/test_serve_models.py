"""`thermocline serve --models`: which flags go together, and what reaches the server."""

from __future__ import annotations

import math
import shutil

import pytest

from thermocline.demo import DEMO_MODEL_PATH


@pytest.fixture
def served(monkeypatch) -> dict:
    """What the server was about to serve; none listens."""
    held = {}

    async def serve_models(catalogue, config, *_):
        held.update(names=[model.card.id for model in catalogue.read()], config=config)

    monkeypatch.setattr("thermocline.server.app.serve_models", serve_models)
    return held


@pytest.fixture
def folder(tmp_path):
    """A folder with one model."""
    shutil.copy(DEMO_MODEL_PATH, tmp_path / "demo.gguf")
    return tmp_path


def test_a_folder_and_its_limits(invoke, served, folder):
    """llama.cpp's name of the flag too; sizes and times are as people write them."""
    flags = ["--keep-alive", "1h30m", "--models-memory", "12GiB", "--slot-save-path", str(folder)]
    result = invoke("serve", "--models-dir", str(folder), "--load-timeout", "5", *flags)
    assert result.exit_code == 0, result.stderr
    assert served["names"] == ["demo"]
    config = served["config"]
    assert (config.keep_alive_s, config.load_timeout_s) == (5400.0, 5.0)
    assert config.models_memory_bytes == 12 << 30
    assert config.slot_folder == str(folder)
    invoke("serve", "--models", str(folder), "--keep-alive", "-1")
    assert served["config"].keep_alive_s == math.inf


def test_one_model_may_have_a_time_too(invoke, served):
    """It is loaded on first use then, and the line says that it is served, not opened."""
    assert invoke("serve", str(DEMO_MODEL_PATH), "--keep-alive", "10m").exit_code == 0
    assert len(served["names"]) == 1
    assert served["config"].keep_alive_s == 600.0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["MODEL", "--models", "FOLDER"], "MODEL is for one model"),
        (["--models", "FOLDER", "--alias", "x"], "--alias is for one model"),
        (["--models", "FOLDER", "--any-model"], "--any-model is for one model"),
        (["--models", "EMPTY"], "has no model"),
        (["--models", "nowhere"], "does not exist"),
        (["--models", "FOLDER", "--keep-alive", "soon"], "--keep-alive is 'soon'"),
        (["--models", "FOLDER", "--models-memory", "12"], "did you mean 12GiB"),
        (["--models", "FOLDER", "--load-timeout", "-1"], "--load-timeout is -1.0"),
        (["--slot-save-path", "nowhere"], "does not exist"),
        (["--slot-save-limit", "0B", "--models", "FOLDER"], "--slot-save-limit is 0"),
    ],
)
def test_what_does_not_go_together_is_told(invoke, served, folder, tmp_path, words, told):
    """One line that names the flag, and nothing is served."""
    (tmp_path / "empty").mkdir()
    places = {"MODEL": str(DEMO_MODEL_PATH), "FOLDER": str(folder)}
    places["EMPTY"] = str(tmp_path / "empty")
    result = invoke("serve", *(places.get(word, word) for word in words))
    assert result.exit_code != 0
    assert told in result.stderr
    assert not served
