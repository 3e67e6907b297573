"""Requests of which bytes were changed, dropped, doubled or put in: a production server never fails by them.

THERMOCLINE_RELIABILITY=full sends 10,000 instead of 400.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter

import pytest

from benchmarks.served import served

NUM_REQUESTS = 10_000 if os.environ.get("THERMOCLINE_RELIABILITY") == "full" else 400
BODIES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "caf\u00e9"}],
        "max_tokens": 2,
        "stop": ["a"],
    },
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 1, "logprobs": 2, "n": 1},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "model": "toy",
    },
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/api/generate": {
        "model": "toy",
        "prompt": "a",
        "options": {"num_predict": 2},
        "stream": False,
    },
    "/tokenize": {"content": "a b"},
    "/v1/embeddings": {"input": "a"},
}
BYTES = (
    b"\x00",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b":",
    b'"',
    b"{",
    b"]",
)
WORDS = (
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"1e999",
    b"-0",
    b"\\ud800",
    b"\xef\xbb\xbf",
)
ALLOWED = {501, 503}


def whole_request(rng: random.Random) -> bytes:
    """Return a request that would be answered."""
    path = rng.choice([*BODIES])
    body = json.dumps(BODIES[path], ensure_ascii=False).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Return `raw` with up to four changes; half of them spare the header, so that bodies are reached."""
    for _ in range(rng.randint(1, 4)):
        first = raw.find(b"\r\n\r\n") + 4 if rng.random() < 0.5 else 0
        at = rng.randint(min(max(first, 0), len(raw)), len(raw))
        match rng.randrange(5):
            case 0:
                raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
            case 1:
                raw = raw[:at] + rng.choice(BYTES) + raw[at:]
            case 2:
                raw = raw[:at] + raw[at + rng.randint(1, 20) :]
            case 3:
                raw = raw[:at] + rng.choice(WORDS) + raw[at:]
            case _:
                raw = raw[:at] + raw[max(0, at - 30) : at] + raw[at:]
    return raw


async def exchange(port: int, raw: bytes) -> list[int]:
    """Send the bytes and close this half; return the statuses of all answers, which must come within 10 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        try:
            async with asyncio.timeout(0.5):
                answer = await reader.read()
        except TimeoutError:  # the server waits for more: a body that was cut
            writer.write_eof()
            async with asyncio.timeout(10):
                answer = await reader.read()
    except ConnectionError:
        return []
    finally:
        writer.close()
    lines = answer.split(b"HTTP/1.")[1:]
    return [int(line[2:5]) for line in lines if line[2:5].isdigit()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_no_mutated_request_makes_the_server_fail(toy, record_property):
    """No status of 500 or above but 501 and 503, no line in the log, nothing left, and the next request is served."""
    statuses = Counter[int]()
    async with served(toy) as server:
        num_tasks = (await server.figures())["tasks",]
        places = asyncio.Semaphore(16)

        async def one(number: int) -> None:
            rng = random.Random(number)
            raw, is_whole = whole_request(rng), number % 10 == 0
            if not is_whole:
                raw = mutated(rng, raw)
            async with places:
                found = await exchange(server.port, raw)
            statuses.update(found)
            assert found == [200] or not is_whole, (found, raw)
            assert all(status < 500 or status in ALLOWED for status in found), (found, raw)

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_REQUESTS):
                group.create_task(one(number))
        await server.until_idle(num_tasks)
        async with server.client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 2}
        ) as response:
            assert response.status == 200
    record_property("requests", NUM_REQUESTS)
    record_property("statuses", dict(sorted(statuses.items())))
    assert statuses[400] > 0
