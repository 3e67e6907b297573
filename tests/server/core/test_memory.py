"""Who may take how much of the memory for requests."""

from __future__ import annotations

import pytest

from tests.server.live import TEXT, live
from thermocline.errors import BusyError
from thermocline.server.core.memory import MemoryBudget


def test_beyond_the_budget_others_are_busy():
    """One request alone may take more than all; beside others it may not, and what it had comes back."""
    budget = MemoryBudget(100)
    with budget.share() as first:
        first.add(150)
        with budget.share() as second, pytest.raises(BusyError):
            second.add(1)
        with pytest.raises(BusyError), budget.share() as third:
            third.add(10)
    with budget.share() as one, budget.share() as other:
        one.add(60)
        other.add(40)
        for share in (one, other):
            with pytest.raises(BusyError):
                share.add(1)
        assert (one.num_bytes, other.num_bytes) == (60, 40)
    assert "0 of 100 bytes, 0 holders" in repr(budget)


async def test_a_large_body_beside_others_is_429(small_toy, gate):
    """While one large request is answered, another gets 429 with Retry-After; small ones are served."""
    async with live(small_toy, max_work_bytes=1 << 20) as server:
        _, writer = await server.connect(TEXT, prompt="hello", user="7" * 100_000, max_tokens=2)
        await server.until_requests(1)
        large = {"prompt": "hello", "user": "7" * 100_000, "max_tokens": 2}
        async with server.client.post(TEXT, json=large) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
        gate.open()
        status, _ = await server.post(TEXT, prompt="hello", max_tokens=2)
        assert status == 200
        writer.close()


async def test_many_small_values_count_as_what_they_become(small_toy, gate):
    """20,000 empty objects are a body of 80,000 bytes, and 5.8 MB when they are decoded."""
    async with live(small_toy, max_work_bytes=1 << 20) as server:
        _, writer = await server.connect(TEXT, prompt="hello", user="7" * 70_000, max_tokens=2)
        await server.until_requests(1)
        fields = {"prompt": "hello", "max_tokens": 2}
        assert (await server.post(TEXT, **fields, unknown=[{}] * 20_000))[0] == 429
        gate.open()
        assert (await server.post(TEXT, **fields))[0] == 200
        writer.close()


async def test_many_token_ids_beside_others_are_429(small_toy, gate):
    """A text of 60,000 characters is a small body, and its ids are not: they count before their answer is written."""
    async with live(small_toy, max_work_bytes=1 << 20) as server:
        _, writer = await server.connect(TEXT, prompt="hello", user="7" * 100_000, max_tokens=2)
        await server.until_requests(1)
        long = {"content": "7" * 60_000}
        assert (await server.post("/tokenize", content="hello"))[0] == 200
        async with server.client.post("/tokenize", json=long) as response:
            assert response.status == 429
        gate.open()
        writer.close()
    async with live(small_toy, max_work_bytes=1 << 20) as server:
        status, body = await server.post("/tokenize", **long)
        assert (status, body["count"]) == (200, 60_000)


async def test_prompts_with_too_many_log_probabilities_are_refused(small_toy):
    """What an answer can not hold is refused before anything is computed."""
    async with live(small_toy) as server:
        fields = {"prompt": [[1] * 60] * 1024, "n": 2, "echo": True, "logprobs": 20}
        status, body = await server.post(TEXT, **fields)
        assert status == 400
        assert body["error"]["param"] == "logprobs"


async def test_large_answers_arrive_whole(toy):
    """An answer of many parts is the one that a stream gives."""
    async with live(toy) as server:
        fields = {"prompt": [[1, 2, 3] * 100] * 8, "echo": True, "logprobs": 20, "max_tokens": 1}
        status, body = await server.post(TEXT, **fields)
        assert status == 200
        for choice in body["choices"]:
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 301
            assert logprobs["top_logprobs"][0] is None
            assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 301
        _, some = await server.post("/tokenize", content="7" * 20_000, with_pieces=True)
        _, plain = await server.post("/tokenize", content="7" * 20_000)
        assert [token["id"] for token in some["tokens"]] == plain["tokens"]
        assert some["count"] == len(plain["tokens"])
