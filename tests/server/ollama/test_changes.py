"""Models that clients download and remove, against a hub on this machine, by Ollama's own client."""

from __future__ import annotations

import os

import ollama
import pytest

from tests.server.live import HELLO, live
from tests.server.several import several
from tests.support.local_hub import LocalHub, Repo
from thermocline import EngineConfig
from thermocline.server.core.catalogue import open_catalogue

NAME = "org/toy-GGUF"
MODEL = f"{NAME}:Q4_K_M"


@pytest.fixture
def hub(small_toy, tmp_path, monkeypatch):
    """A hub with one repository of two quantisations, and an empty cache; the real library asks it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    content = small_toy.read_bytes()
    files = {"toy-Q4_K_M.gguf": content, "toy-Q8_0.gguf": content + bytes(64)}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", os.fspath(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.fspath(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", os.fspath(tmp_path / "agents.json"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", os.fspath(tmp_path / "hf"))
    with LocalHub({NAME: Repo(files)}) as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = hub.url + template.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub
        close_session()


def cache():
    """Return the catalogue of the hub's cache alone."""
    return open_catalogue([], EngineConfig(), with_cache=True)


async def test_a_model_is_pulled_used_and_deleted(hub):
    """Progress in Ollama's form up to the whole size; the model answers; afterwards it is gone from disk and lists."""
    async with (
        several(cache(), allows_model_changes=True) as server,
        ollama.AsyncClient(host=server.server.url) as client,
    ):
        assert (await client.list()).models == []
        said = [step async for step in await client.pull(f"hf.co/{NAME}", stream=True)]
        assert said[0].status == "pulling manifest"
        assert said[-1].status == "success"
        totals = [(step.completed, step.total, step.digest) for step in said if step.total]
        assert all(digest.startswith("sha256:") for _, _, digest in totals)
        assert all(0 <= (done or 0) <= total for done, total, _ in totals)
        assert [model.model for model in (await client.list()).models] == [MODEL]
        for name in (MODEL, f"hf.co/{MODEL}"):
            answer = await client.chat(name, messages=HELLO, options={"num_predict": 2})
            assert answer.eval_count == 2
        again = await client.pull(MODEL)
        assert again.status == "success"
        assert len(hub.downloads()) == 1
        await client.delete(MODEL)
        assert (await client.list()).models == []
        assert server.states() == {}
        with pytest.raises(ollama.ResponseError) as caught:
            await client.chat(MODEL, messages=HELLO)
        assert caught.value.status_code == 404


async def test_what_can_not_be_pulled_is_told(hub):
    """An unknown repository, no name at all, a quantisation that there is not, a hub that is away."""
    async with (
        several(cache(), allows_model_changes=True) as server,
        ollama.AsyncClient(host=server.server.url) as client,
    ):
        for name, told in (
            ("org/other", "org/other"),
            ("llama3.2", "ORG/REPO"),
            (f"{NAME}:Q2_K", "Q2_K"),
        ):
            with pytest.raises(ollama.ResponseError, match=told):
                await client.pull(name)
        hub.is_down = True
        with pytest.raises(ollama.ResponseError, match="Fix"):
            [step async for step in await client.pull(NAME, stream=True)]
        with pytest.raises(ollama.ResponseError) as caught:
            await client.delete("org/other")
        assert caught.value.status_code == 404


async def test_nothing_is_changed_without_the_flag(hub, small_toy, tmp_path):
    """403 that names it, and a file of a folder is never removed."""
    async with live(small_toy) as server:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            async with server.client.request(method, path, json={"model": MODEL}) as response:
                assert response.status == 403
                assert "--allow-model-changes" in (await response.json())["error"]
    assert hub.asked == []
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(small_toy.read_bytes())
    catalogue = open_catalogue([folder], EngineConfig(), with_cache=True)
    async with (
        several(catalogue, allows_model_changes=True) as server,
        server.client.delete("/api/delete", json={"model": "mine"}) as response,
    ):
        assert response.status == 403
    assert (folder / "mine.gguf").exists()
