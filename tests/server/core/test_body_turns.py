"""Large bodies that end at once are decoded one after the other, with room for other requests between them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from thermocline.server.core.body_reader import BodyReader
from thermocline.server.core.json_shape import ShapeCheck
from thermocline.server.core.memory import MEMORY
from thermocline.server.core.settings import ServerConfig


class Arrived:
    """A request whose body is there."""

    content_type = "application/json"
    content_length = None

    def __init__(self, body: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.content = self
        self._body = body

    def __getitem__(self, key: object) -> SimpleNamespace:
        assert key is MEMORY
        return SimpleNamespace(add=lambda num_bytes: None)

    async def iter_any(self):
        for start in range(0, len(self._body), 1 << 18):
            yield self._body[start : start + (1 << 18)]


@pytest.mark.parametrize(("num_bytes", "num_rounds"), [(1 << 20, 8), (100, 1)])
async def test_each_large_body_has_a_round_of_the_loop(num_bytes, num_rounds):
    """The limit on what one round computes holds however many bodies end at once; small ones need not wait."""
    reader, rounds = BodyReader(ServerConfig()), []
    number = 0

    async def count() -> None:
        nonlocal number
        while True:
            await asyncio.sleep(0)
            number += 1

    async def read() -> None:
        await reader.read(Arrived(b" " * num_bytes))
        rounds.append(number)

    counter = asyncio.create_task(count())
    async with asyncio.timeout(5):
        await asyncio.gather(*(read() for _ in range(8)))
    counter.cancel()
    assert len(set(rounds)) == num_rounds, rounds


async def test_each_piece_of_a_large_body_has_a_round_of_the_loop(monkeypatch):
    """Sixteen bodies of a megabyte of short texts, looked at as they came, held the loop up for 100 ms."""
    reader, rounds, number = BodyReader(ServerConfig()), [], 0

    async def count() -> None:
        nonlocal number
        while True:
            await asyncio.sleep(0)
            number += 1

    monkeypatch.setattr(ShapeCheck, "feed", lambda _, piece: rounds.append(number))
    counter = asyncio.create_task(count())
    async with asyncio.timeout(5):
        await asyncio.gather(*(reader.read(Arrived(b" " * (1 << 20))) for _ in range(8)))
    counter.cancel()
    assert len(rounds) == len(set(rounds)) == 8 * 4, rounds
