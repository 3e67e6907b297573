"""Many embeddings are written while others go on."""

from __future__ import annotations

import asyncio
import base64
import time

import msgspec
import numpy as np
import pytest

from thermocline.server.core.vectors import vectors_as_json
from thermocline.workers.offload import Offload


@pytest.fixture
def offload():
    """Threads, ended after the test."""
    threads = Offload()
    yield threads
    threads.close()


async def test_vectors_are_written_as_they_are(offload):
    """Numbers and packed bytes are those of the vectors, to the bit; none gives none."""
    vectors = np.random.default_rng(3).standard_normal((3, 7)).astype(np.float32)
    numbers = msgspec.json.decode(msgspec.json.encode(await vectors_as_json(vectors, offload)))
    np.testing.assert_array_equal(np.array(numbers, np.float32), vectors)
    texts = msgspec.json.decode(
        msgspec.json.encode(await vectors_as_json(vectors, offload, packed=True))
    )
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), vector)
    assert await vectors_as_json(vectors[:0], offload) == []


async def test_a_large_answer_leaves_the_loop_free(offload):
    """Two million numbers take longer in all than any wait of the loop meanwhile."""
    vectors = np.ones((1024, 2048), np.float32) / 3
    written = asyncio.create_task(vectors_as_json(vectors, offload))
    start = last = time.perf_counter()
    longest = 0.0
    while not written.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert len(await written) == 1024
    assert longest < (last - start) / 2
