"""A request may say who drafts its tokens; what came of it is seen, and the answer is the same."""

from __future__ import annotations

import pytest

from tests.server.live import TEXT, live

BODY = {"prompt": "abcdefgh" * 6, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.slow
async def test_a_request_chooses_its_drafters(toy):
    """off, auto and names give one text; the reason why drafting is off is told."""
    async with live(toy) as server:
        bodies = {}
        for name in (None, "auto", "off", "lookup"):
            body = BODY if name is None else BODY | {"speculate": name}
            status, bodies[name] = await server.post(TEXT, **body)
            assert status == 200, bodies[name]
        texts = {body["choices"][0]["text"] for body in bodies.values()}
        timings = {name: body["timings"] for name, body in bodies.items()}
        async with server.client.get("/metrics") as response:
            metrics = await response.text()
    assert len(texts) == 1
    assert timings["off"]["draft_off"] == "it was turned off"
    assert (timings["off"]["draft_n"], timings["off"]["draft_n_accepted"]) == (0, 0)
    assert "turned off" not in timings["lookup"].get("draft_off", "")
    drafted = sum(each["draft_n"] for each in timings.values())
    assert f'draft_tokens_total{{drafter="lookup"}} {drafted}' in metrics
    assert "speculation_off" in metrics


@pytest.mark.parametrize("name", ["nobody", "", "lookup,", "lookup,nobody"])
async def test_a_drafter_that_there_is_not_is_refused(toy, name):
    """A 400 that names the field and what there is."""
    async with live(toy) as server:
        status, body = await server.post(TEXT, **BODY, speculate=name)
    assert status == 400
    assert body["error"]["param"] == "speculate"
    assert "auto" in body["error"]["message"]
