"""In every interface a request may say who drafts its tokens; the engine is asked for just these."""

from __future__ import annotations

import pytest

from tests.server.live import live
from tests.server.test_interfaces import (
    API_CHAT,
    API_GENERATE,
    GOOD,
    MESSAGES,
    RESPONSES,
    told_error,
)
from thermocline.engine.api import Engine


def saying(path: str, names: str) -> dict:
    """Return a good body with this choice. Ollama's clients send what else they want in options."""
    if path.startswith("/api/"):
        return GOOD[path] | {"options": GOOD[path]["options"] | {"speculate": names}}
    return GOOD[path] | {"speculate": names}


@pytest.mark.slow
async def test_the_engine_is_asked_for_the_named_drafters(toy, monkeypatch):
    """None where a request names none, and for auto."""
    seen = []
    original = Engine.events

    def noting(self, prompt, params, options):
        seen.append(options.speculate)
        return original(self, prompt, params, options)

    monkeypatch.setattr(Engine, "events", noting)
    raw = saying(API_GENERATE, "off") | {"raw": True}
    async with live(toy) as server:
        for path in (RESPONSES, MESSAGES, API_CHAT, API_GENERATE):
            bodies = GOOD[path], *(saying(path, names) for names in ("auto", "off", "lookup"))
            for body in bodies:
                status, answer = await server.post(path, **body)
                assert status == 200, answer
            assert seen == [None, None, (), ("lookup",)], path
            seen.clear()
        assert (await server.post(API_GENERATE, **raw))[0] == 200
        assert seen == [()]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, API_CHAT, API_GENERATE])
async def test_a_drafter_that_there_is_not_is_refused(toy, path):
    """A 400 in the interface's own shape that says what there is; also for what is no list of names, or no text."""
    async with live(toy) as server:
        for names, told in (
            ("nobody", "choose of auto, off, lookup"),
            ("lookup,", "auto, off"),
            (5, "speculate"),
        ):
            status, body = await server.post(path, **saying(path, names))
            assert status == 400, body
            assert told in told_error(path, body)[1]
