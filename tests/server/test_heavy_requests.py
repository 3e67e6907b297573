"""Whatever a client sends: others' streams go on, the loop does not stall, and the memory comes back.

THERMOCLINE_RELIABILITY=full tries large answers beside a stream.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from contextlib import asynccontextmanager

import pytest

from benchmarks.served import served
from tests.server.bystander import bystander, forget_peak, resident_mib, waited_s
from tests.server.live import HELLO
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.server.openai.tokens import MAX_TOKENIZED_CHARS

FULL = os.environ.get("THERMOCLINE_RELIABILITY") == "full"
MAX_MIB = 256
MAX_KEPT_MIB = 96
MAX_STALL_S = (
    0.5  # whoever holds the interpreter may wait for a processor, which other programs have
)
MAX_GAP_S = 0.25


class Watch:
    """Notes whatever breaks the rule."""

    def __init__(self, server, reader, control_gap_s):
        self._server = server
        self._reader = reader
        # On a machine that others use, a stream has gaps when nothing else is sent.
        self._max_gap_s = MAX_GAP_S + control_gap_s
        self._pid = server.process.pid
        self.gaps: list[tuple[float, object]] = []
        self.peaks: list[tuple[float, object]] = []
        self.faults: list[object] = []

    @asynccontextmanager
    async def alone(self, what):
        """One request: with its memory."""
        before = resident_mib(self._pid)
        forget_peak(self._pid)
        async with self.together(what):
            yield
        grown = resident_mib(self._pid, peak=True) - before
        self.peaks.append((grown, what))
        if grown > MAX_MIB:
            self.faults.append(("memory", grown, what))

    @asynccontextmanager
    async def together(self, what):
        """One request or several."""
        # Making a large body held this process's loop up, and so the reader.
        await self._reader.until_read(3)
        self._reader.take_gap_s()
        before = waited_s(self._pid)
        yield
        gap_s = self._reader.take_gap_s()
        # Nothing that the server does makes others use the processors.
        after = waited_s(self._pid)
        waiting_s = max(after[task] - before.get(task, 0) for task in after)
        self.gaps.append((gap_s - waiting_s, what))
        if gap_s > self._max_gap_s + waiting_s:
            self.faults.append(("silence", gap_s, waiting_s, what))

    def worst(self):
        """Return the longest gaps and the highest peaks, for people."""
        return [sorted(found, key=str)[-3:] for found in (self.gaps, self.peaks)]


async def post(server, path, body):
    """Return the status of a POST whose answer is read to its end."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        async with server.client.post(path, data=io.BytesIO(raw), headers=headers) as response:
            async for _ in response.content.iter_chunked(1 << 20):
                pass
            return response.status
    except (ConnectionError, OSError):
        return 413  # refused while it was being sent


async def stalls(server):
    """Return how many looks at the server's loop found it stalled for longer than MAX_STALL_S."""
    figures = await server.figures()
    name = "event_loop_stall_seconds_bucket"
    return figures[name, "+Inf"] - figures[name, str(MAX_STALL_S)]


@asynccontextmanager
async def watched():
    """A production server with a bystander; afterwards its memory must come back."""
    async with served(DEMO_MODEL_PATH, "--max-queue", "128") as server:
        await post(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
        async with bystander(server) as reader:
            await reader.until_read(200)
            control_gap_s = reader.take_gap_s()
            before, stalls_before = resident_mib(server.process.pid), await stalls(server)
            watch = Watch(server, reader, control_gap_s)
            yield server, watch
            assert not watch.faults, (watch.faults, watch.worst())
            assert await stalls(server) == stalls_before
            deadline_s = time.monotonic() + 10
            while (kept := resident_mib(server.process.pid) - before) > MAX_KEPT_MIB:
                assert time.monotonic() < deadline_s, kept
                await asyncio.sleep(0.1)


WORDS = "the cat saw a dog and went to the big house by the river " * 60


HEAVY = {
    "tokens": (
        "/tokenize",
        {"content": "7" * MAX_TOKENIZED_CHARS, "with_pieces": True},
    ),
    "pieces of a chat": ("/tokenize", {"messages": [{"role": "user", "content": WORDS}]}),
    "prompts with log-probabilities": (
        "/v1/completions",
        {
            "prompt": [WORDS[k:] for k in range(40)],
            "echo": True,
            "logprobs": 20,
            "max_tokens": 0,
        },
    ),
    "answers with log-probabilities": (
        "/v1/chat/completions",
        {"messages": HELLO, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        | {"max_tokens": 1500},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["a cat"] * 512}),
    "ids": ("/detokenize", {"tokens": [7] * 500_000}),
}


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="takes minutes: set THERMOCLINE_RELIABILITY=full")
@pytest.mark.timeout(600)
async def test_heavy_answers_leave_others_alone():
    """What is large although each of its fields is allowed is made, sent and forgotten without anybody's notice.

    Sixteen long texts at a time hold nobody up either, and when their clients leave, the work ends.
    """
    async with watched() as (server, watch):
        for kind, (path, body) in HEAVY.items():
            async with watch.alone(kind):
                assert await post(server, path, body) == 200, kind
        path, raw = "/tokenize", json.dumps({"content": "7" * MAX_TOKENIZED_CHARS}).encode()
        long = {"content": "the cat " * 5000}
        async with watch.together("a crowd"):
            crowd = await gathered(server, path, raw)
            assert await post(server, path, {"content": "hello"}) == 200
            await dispersed(crowd)
        async with asyncio.timeout(20):
            assert await post(server, path, long) == 200


@pytest.mark.slow
async def test_long_work_does_not_keep_the_process_alive():
    """With sixteen long texts in work, SIGTERM is obeyed within 20 s, although nobody has left."""
    raw = json.dumps({"content": "7" * MAX_TOKENIZED_CHARS}).encode()
    async with served(DEMO_MODEL_PATH, "--shutdown-timeout", "1") as server:
        crowd = await gathered(server, "/tokenize", raw)
        began_s = time.monotonic()
        server.process.terminate()
        await server.process.wait()
        assert time.monotonic() - began_s < 20
        assert set(await asyncio.gather(*crowd)) <= {413, 503}


async def gathered(server, path, raw):
    """Return the tasks of sixteen requests that the server has received."""
    crowd = [asyncio.create_task(post(server, path, raw)) for _ in range(16)]
    while (await server.figures())["tasks",] < 16:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)
    return crowd


async def dispersed(crowd):
    """Make the clients leave."""
    for task in crowd:
        task.cancel()
    await asyncio.wait(crowd)
