"""Long work never keeps short work waiting, and ends when nobody wants it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from functools import partial
from queue import Empty, SimpleQueue

import msgspec
import pytest

from thermocline.errors import EngineClosedError, RequestError
from thermocline.server.ollama.schema import OllamaChatRequest
from thermocline.workers.offload import BULK_CHARS, Offload, UnwantedError, _Job, _Threads, is_bulk


@pytest.fixture
def offload():
    """Threads, ended after the test."""
    threads = Offload()
    yield threads
    threads.close()


async def test_short_work_passes_long_work(offload):
    """With more long work than threads, all of it held up, short work is done at once."""
    gate = threading.Event()
    try:
        long = [
            asyncio.create_task(offload.run(lambda _: gate.wait(10), is_bulk=True))
            for _ in range(16)
        ]
        await asyncio.sleep(0)
        assert await offload.run(lambda _: 7, is_bulk=False) == 7
        assert not any(task.done() for task in long)
    finally:
        gate.set()
    assert all(await asyncio.gather(*long))


async def test_work_that_nobody_wants_ends(offload):
    """A cancelled caller's work that runs is told, and one that waits never begins."""
    begun, ended, others = threading.Event(), threading.Event(), []

    def endless(still_wanted):
        begun.set()
        try:
            while True:
                still_wanted()
        except UnwantedError:
            ended.set()
            raise

    running = [asyncio.create_task(offload.run(endless, is_bulk=True)) for _ in range(4)]
    assert await asyncio.to_thread(begun.wait, 10)
    waiting = asyncio.create_task(offload.run(lambda _: others.append(1), is_bulk=True))
    await asyncio.sleep(0)
    waiting.cancel()
    for task in running:
        task.cancel()
    await asyncio.wait([waiting, *running])
    assert await asyncio.to_thread(ended.wait, 10)
    assert await offload.run(lambda _: 8, is_bulk=True) == 8
    assert not others


async def test_errors_are_the_callers(offload):
    """What the work raises arrives; after the end nothing is taken, and what waited fails."""
    with pytest.raises(RequestError, match="as told"):
        await offload.run(lambda _: _fail(), is_bulk=False)
    gate = threading.Event()
    tasks = [
        asyncio.create_task(offload.run(lambda _: gate.wait(10), is_bulk=True)) for _ in range(9)
    ]
    await asyncio.sleep(0)
    offload.close()
    gate.set()
    await asyncio.wait(tasks)
    assert all(isinstance(task.exception(), EngineClosedError | None) for task in tasks)
    assert isinstance(tasks[-1].exception(), EngineClosedError)
    with pytest.raises(EngineClosedError):
        await offload.run(lambda _: 1, is_bulk=False)


class _Body:
    """What a request holds."""


@pytest.mark.parametrize("is_bulk", [True, False])
async def test_what_failed_work_held_is_freed_at_once(offload, is_bulk):
    """Not when cycles are collected next: a few texts of megabytes are too few objects to bring that about."""

    async def fail():
        body, freed = _Body(), threading.Event()
        weakref.finalize(body, freed.set)
        all_freed.append(freed)

        def work(_):
            raise RequestError(f"about {body}")

        await offload.run(work, is_bulk=is_bulk)

    all_freed = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(RequestError, match="about"):
                await fail()
        for freed in all_freed:  # as soon as its thread has forgotten the job
            assert await asyncio.to_thread(freed.wait, 10)
    finally:
        gc.enable()


def test_memory_is_looked_for_while_results_are_sent():
    """After the last job, as often as there are pauses, and not for ever."""
    looks = SimpleQueue()
    threads = _Threads("looked after", 1, lambda: looks.put(1), pauses_s=(0.01, 0.02))
    job = _Job(lambda _: 7)
    threads.submit(job)
    assert job.future.result(10) == 7
    for _ in range(3):
        looks.get(timeout=10)
    with pytest.raises(Empty):
        looks.get(timeout=0.1)
    threads.close()


async def test_memory_is_returned_when_asked(offload, monkeypatch):
    """Also if no job freed it; and asking is no fault when all is closed."""
    looked = threading.Event()
    monkeypatch.setattr(offload._bulk, "_after_each", looked.set)
    offload.return_memory()
    assert await asyncio.to_thread(looked.wait, 10)
    offload.close()
    offload.return_memory()


def _fail():
    raise RequestError("as told")


CHAT = b'{"model": "a", "messages": [{"role": "user", "content": "%s"}]}'


def test_what_is_long():
    """Characters count wherever they are, and so do entries, without looking at millions of them."""
    assert not is_bulk("a" * BULK_CHARS, None, 3)
    assert is_bulk("a" * BULK_CHARS, "a")
    assert is_bulk([{"content": "a" * BULK_CHARS}])
    assert is_bulk({"content": [{"text": "a" * BULK_CHARS}]})
    assert is_bulk([1] * BULK_CHARS)
    assert not is_bulk([{"role": "user", "content": "hello"}] * 100)
    assert is_bulk(msgspec.json.decode(CHAT % (b"a" * BULK_CHARS), type=OllamaChatRequest))
    assert is_bulk(msgspec.json.decode(CHAT % b"", type=OllamaChatRequest), "a" * BULK_CHARS)
    assert not is_bulk(msgspec.json.decode(CHAT % b"", type=OllamaChatRequest))


def test_finding_out_what_is_long_costs_no_more_than_the_work():
    """Sixteen chats of hundreds of messages may be looked at in one round of the loop."""
    raw = CHAT % b'"},{"role":"user","content":"'.join([b""] * 340)
    request = msgspec.json.decode(raw, type=OllamaChatRequest)
    assert len(request.messages) == 340

    def seconds(work) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    pairs = [(seconds(partial(is_bulk, request)), seconds(request.normalized)) for _ in range(30)]
    looking_s, reading_s = map(min, zip(*pairs, strict=True))
    assert looking_s < 6 * reading_s
