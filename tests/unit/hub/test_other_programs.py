"""Models of Ollama and LM Studio: names, paths, and folders that are damaged or hostile."""

from __future__ import annotations

import json
import os

import pytest

from thermocline.environment import lm_studio_folders, ollama_folders
from thermocline.hub.other_programs import lm_studio_models, ollama_models

DIGEST = "ab" * 32


def put_manifest(folder, name, content):
    """Write a manifest, as text or as JSON."""
    path = folder / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def layers(digest):
    """A manifest with weights of this digest."""
    return {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("registry.ollama.ai/library/qwen3/30b-a3b", "qwen3:30b-a3b"),
        ("registry.ollama.ai/someone/toy/latest", "someone/toy:latest"),
        ("hf.co/acme/toy-GGUF/Q4_K_M", "hf.co/acme/toy-GGUF:Q4_K_M"),
    ],
)
def test_names_of_ollama(tmp_path, place, name):
    """A model is called what `ollama list` calls it; its path is the blob of its weights."""
    put_manifest(tmp_path, place, layers(f"sha256:{DIGEST}"))
    blob = tmp_path / "blobs" / f"sha256-{DIGEST}"
    assert list(ollama_models(tmp_path)) == []
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    (model,) = ollama_models(tmp_path)
    assert (model.program, model.name, model.nbytes, model.path) == ("Ollama", name, 4, blob)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "7", "null", '{"layers": 3}', '{"layers": [7, null, {}]}', "[" * 100_000,
        layers("sha256:../../../../etc/passwd"), layers(f"sha256:{DIGEST[:-1]}"), layers(7), layers(None),
        {"padding": " " * (2 << 20)} | layers(f"sha256:{DIGEST}"),
    ],
)  # fmt: skip
def test_manifests_that_are_none(tmp_path, content):
    """Damaged ones, and digests that would lead elsewhere, are no models."""
    put_manifest(tmp_path, "registry.ollama.ai/library/toy/8b", content)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"sha256-{DIGEST}").write_bytes(b"GGUF")
    assert [model.name for model in ollama_models(tmp_path)] == []


def test_models_of_lm_studio(tmp_path):
    """Whole models by their place; split ones once, parts and projectors never; a loop of links ends."""
    folder = tmp_path / "acme" / "toy-GGUF"
    folder.mkdir(parents=True)
    for name in (
        "toy-Q4_K_M.gguf",
        "mmproj-F16.gguf",
        "readme.md",
        "half-Q8_0-00001-of-00002.gguf",
    ):
        (folder / name).write_bytes(b"GGUF")
    for number in (1, 2):
        (folder / f"two-F16-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    (folder / "loop").symlink_to(tmp_path)
    (folder / "gone-Q2_K.gguf").symlink_to(tmp_path / "nowhere")
    found = [(model.name, model.nbytes) for model in lm_studio_models(tmp_path)]
    assert found == [
        ("acme/toy-GGUF/toy-Q4_K_M.gguf", 4),
        ("acme/toy-GGUF/two-F16-00001-of-00002.gguf", 8),
    ]
    assert list(lm_studio_models(tmp_path / "nothing")) == []


def test_where_the_programs_keep_models(monkeypatch, tmp_path):
    """OLLAMA_MODELS alone where it is set; else folders of this user, and of Ollama's service."""
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    assert tmp_path / ".ollama/models" in ollama_folders()
    assert lm_studio_folders() == (
        tmp_path / ".lmstudio/models",
        tmp_path / ".cache/lm-studio/models",
    )
    monkeypatch.setenv("OLLAMA_MODELS", "/somewhere")
    assert list(map(os.fspath, ollama_folders())) == ["/somewhere"]
