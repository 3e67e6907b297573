"""Hundreds of clients that leave at any moment leave nothing behind, on a production server too."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
from contextlib import suppress

import pytest

from benchmarks.served import served
from tests.server.live import CHAT, HELLO, TEXT, live, until

NUM_DISCONNECTS = 2000 if os.environ.get("THERMOCLINE_RELIABILITY") == "full" else 200

# A close with this set is a reset.
NO_LINGER = struct.pack("ii", 1, 0)


def a_request(rng: random.Random) -> tuple[bytes, bool]:
    """Return a request of any kind, and whether it asks whole for a stream.

    Chat or text, short or long prompt, streamed or not, cut off somewhere or whole.
    """
    stream, is_whole = rng.random() < 0.5, rng.random() < 0.8
    fields = {"stream": stream, "ignore_eos": True}
    if rng.random() < 0.15:
        path, fields = CHAT, fields | {"messages": HELLO}
    else:
        path, fields = TEXT, fields | {"prompt": "a" * rng.choice([1, 30, 2000]), "n": 2}
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return raw if is_whole else raw[: rng.randrange(len(raw))], stream and is_whole


async def leave_somewhere(port: int, rng: random.Random) -> None:
    """GenerationJob, read or wait as long as chance wants, and leave: politely, by halves, or with a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw, is_stream = a_request(rng)
    writer.write(raw)
    if is_stream:
        for _ in range(rng.choice([0, 1, 5, 20])):
            await reader.readuntil(b"\n\n")
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.choice([0.0, 0.01, 0.1])):
                await reader.read(1)
    match rng.randrange(3):
        case 0:
            writer.write_eof()
            await reader.read()
        case 1:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER
            )
            writer.transport.abort()
        case _:
            pass
    writer.close()


async def storm(port: int, num_requests: int, seed: int) -> None:
    """Let so many clients come and leave, up to sixteen at a time."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with places:
            await leave_somewhere(port, random.Random(f"{seed} {number}"))

    async with asyncio.TaskGroup() as group:
        for number in rng.sample(range(num_requests), num_requests):
            group.create_task(one(number))


@pytest.mark.slow
async def test_a_storm_leaves_the_engine_consistent(toy):
    """Scheduler, cache and ring agree after it, and every block is free."""
    async with live(toy) as server:
        before = len(asyncio.all_tasks())
        await storm(int(server.server.url.rpartition(":")[2]), 50, seed=1)
        await server.until_in_flight(0)
        await server.settle()
        await until(lambda: len(asyncio.all_tasks()) <= before)
        await server.chat(max_tokens=2)


@pytest.mark.slow
async def test_a_production_server_survives_hundreds_of_disconnects(toy, record_property):
    """On uvloop, in a process of its own: no request, block, task or connection is left."""
    async with served(toy) as server:
        num_tasks = (await server.figures())["tasks",]
        await storm(server.port, NUM_DISCONNECTS, seed=2)
        found = await server.until_idle(num_tasks)
        record_property("disconnects", NUM_DISCONNECTS)
        assert found["request_failure_total", "abort"] > NUM_DISCONNECTS // 5
        async with server.client.post(TEXT, json={"prompt": "a", "max_tokens": 2}) as response:
            assert response.status == 200
