"""A line per request where it is asked for: whole streams, refusals and clients that left; never a body or a key."""

from __future__ import annotations

import logging

from tests.server.live import CHAT, HELLO, live, until
from thermocline.server.core.access_log import ACCESS


async def test_every_request_has_a_line(toy, caplog):
    """With status, time and the id that its answer has, whatever became of it."""
    caplog.set_level(logging.INFO, ACCESS.name)
    async with live(toy) as server:
        await server.chat(max_tokens=2)
        async with server.client.post(CHAT, json={"messages": "secret"}) as refused:
            assert refused.status == 400
        async with server.client.get("/nowhere?key=secret") as missing:
            assert missing.status == 404
        await server.stream(CHAT, messages=HELLO, max_tokens=2)
        _, writer = await server.connect(CHAT, messages=HELLO, stream=True)
        await server.until_requests(1)
        writer.close()
        await until(lambda: len(caplog.records) == 5)
    fields = [record.fields for record in caplog.records]
    assert [each["status"] for each in fields] == [200, 400, 404, 200, 499]
    assert [each["path"] for each in fields] == [CHAT, CHAT, "/nowhere", CHAT, CHAT]
    assert fields[1]["request_id"] == refused.headers["X-Request-Id"]
    assert all(each["seconds"] > 0 for each in fields)
    assert "POST /v1/chat/completions 200 in " in caplog.messages[0]
    assert "secret" not in caplog.text


async def test_nobody_is_logged_unasked(toy, caplog):
    """By default nothing is written."""
    async with live(toy) as server:
        await server.chat(max_tokens=1)
    assert not caplog.records
