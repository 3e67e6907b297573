"""Clients that leave, wait or do not read; models that are loading; servers that are told to stop."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import aiohttp
import pytest

from tests.server.live import CARD, CHAT, HELLO, TEXT, Live, live, parse_events, until
from tests.support.toy_model import write_toy_model
from thermocline import EngineConfig, PlacementConfig, SchedulerConfig
from thermocline.engine import thread as engine_thread
from thermocline.engine.assembly import LoadStep
from thermocline.errors import ConfigError, ModelFileError
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.whole_step import NativeStep
from thermocline.server.app import running_server, serve
from thermocline.server.core.exchange import POOL
from thermocline.server.core.settings import ServerConfig

ENDLESS = {"prompt": "hello", "ignore_eos": True}


async def body_of(reader) -> bytes:
    """Read a chunked response to its end and return the body."""
    await reader.readuntil(b"\r\n\r\n")
    return await chunks_of(reader)


async def chunks_of(reader) -> bytes:
    """Read the chunks of a body to their end and return what they hold."""
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    return body


@pytest.mark.slow
async def test_leaving_a_stream_at_any_point_ends_its_request(toy):
    """However much was read, a closed or reset connection leaves nothing in the engine."""
    rng = random.Random(5)
    async with live(toy) as server:
        for turn in range(12):
            reader, writer = await server.connect(TEXT, stream=True, **ENDLESS)
            for _ in range(rng.choice([0, 1, 2, 7, 30])):
                await reader.readuntil(b"\n\n")
            writer.transport.abort() if turn % 2 else writer.close()
            await server.until_in_flight(0)
            await server.settle()


@pytest.mark.slow
async def test_leaving_a_whole_answer_ends_its_request(toy):
    """A client of an answer that is not streamed is missed too, before and while tokens come."""
    rng = random.Random(6)
    async with live(toy) as server:
        for turn in range(12):
            _, writer = await server.connect(TEXT, **ENDLESS)
            for _ in range(rng.choice([0, 1, 5, 20])):
                await asyncio.sleep(0)
            if turn % 3:
                await server.until_requests(1)
            writer.transport.abort() if turn % 2 else writer.close()
            await server.until_in_flight(0)
            await server.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_the_prompt_ends_the_request_within_a_step(toy, gate, stream):
    """Of a prompt of eight chunks, at most the two that were in flight are computed."""
    config = EngineConfig(scheduler=SchedulerConfig(prefill_chunk_tokens=16))
    async with live(toy, config, open_after_s=0.0) as server:
        _, writer = await server.connect(TEXT, prompt=[1] * 128, stream=stream)
        await server.until_requests(1)
        _, queued = await server.connect(TEXT, prompt=[2] * 128, stream=stream)
        await server.until_requests(2)
        for leaving in (queued, writer):
            leaving.close()
        await server.until_in_flight(0)
        await server.until_requests(0)
        gate.open()
        await server.settle()
        assert gate.num_calls <= 2 * 2  # one for each layer


async def test_silence_is_filled_with_signs_of_life(toy, gate):
    """A stream starts and stays alive while its prompt is computed, and then goes on as any other."""
    async with live(toy, open_after_s=0.0, ping_after_s=0.005) as server:
        fields = {"messages": HELLO, "stream": True, "max_tokens": 3, "ignore_eos": True}
        async with server.client.post(CHAT, json=fields) as response:
            assert response.status == 200
            raw = b""
            while raw.count(b": ping\n\n") < 3:
                raw += await response.content.readany()
            gate.open()
            raw += await response.read()
    events = parse_events(raw)
    assert raw.startswith(b"data: ")
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"


async def test_a_stream_without_silence_has_no_pings(toy):
    """Signs of life come only after the time that was set."""
    async with live(toy) as server:
        fields = {"prompt": "hello", "stream": True, "max_tokens": 3, "ignore_eos": True}
        async with server.client.post(TEXT, json=fields) as response:
            assert b": ping" not in await response.read()


@pytest.mark.parametrize("fail_on", [1, 40])
async def test_a_failure_in_a_stream_is_its_terminal_event(toy, monkeypatch, fail_on):
    """Before the first event it is a plain 500; after it an error event, and no [DONE]."""
    calls = 0

    def failing(real):
        def call(self, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fail_on:
                raise MemoryError("no room, as told")
            return real(self, *args, **kwargs)

        return call

    # A prompt's experts, and a layer or all of them of a step of the answer.
    parts = (
        (NativeKernels, "expert_sum"),
        (NativeKernels, "whole_layer"),
        (NativeStep, "__call__"),
    )
    for owner, name in parts:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    async with live(toy) as server:
        fields = {"messages": HELLO, "stream": True, "max_tokens": 100, "ignore_eos": True}
        async with server.client.post(CHAT, json=fields) as response:
            raw = await response.read()
        if fail_on == 1:
            assert response.status == 500
            error = json.loads(raw)["error"]
        else:
            events = [json.loads(event) for event in parse_events(raw)]
            assert all("error" not in event for event in events[:-1])
            error = events[-1]["error"]
        assert error["type"] == "server_error"
        assert "no room, as told" in error["message"]
        await server.chat(max_tokens=2)


async def test_a_failure_in_a_prompt_after_the_stream_opened_is_an_event(toy, gate, monkeypatch):
    """A stream that was opened by waiting ends with the error, not with silence."""

    def failing(self, *args, **kwargs):
        raise MemoryError("no room, as told")

    monkeypatch.setattr(NativeKernels, "whole_layer", failing)
    async with live(toy, open_after_s=0.0) as server:
        reader, writer = await server.connect(TEXT, stream=True, **ENDLESS)
        assert b" 200 " in await reader.readline()
        gate.open()
        (event,) = parse_events(await body_of(reader))
        assert json.loads(event)["error"]["type"] == "server_error"
        writer.close()


@pytest.mark.slow
async def test_a_reader_that_does_not_read_holds_nobody_up(toy):
    """While one client leaves its stream unread, others are served; its own answer still ends."""
    async with live(toy) as server:
        port = int(server.server.url.rpartition(":")[2])
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stuck.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stuck, ("127.0.0.1", port))
        body = json.dumps({"stream": True, "max_tokens": 400, **ENDLESS}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        await asyncio.get_running_loop().sock_sendall(stuck, head.encode() + body)
        await server.until_requests(1)
        await server.chat(max_tokens=5)
        await server.until_requests(0)
        stuck.close()


async def test_while_the_model_loads_the_server_says_so(toy, monkeypatch):
    """503 with llama-server's words until the model is open, then 200."""
    opened = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = engine_thread.load_parts

    def slow(path, config, on_step):
        def pause(step):
            on_step(step)
            if step is LoadStep.TOKENIZER:
                asyncio.run_coroutine_threadsafe(opened.wait(), loop).result(10)

        return real(path, config, pause)

    monkeypatch.setattr(engine_thread, "load_parts", slow)
    config = ServerConfig(port=0)
    async with (
        running_server(toy, EngineConfig(), config, CARD) as server,
        aiohttp.ClientSession(base_url=server.url) as client,
    ):
        backend = server.app[POOL].shown
        await until(lambda: backend.load_step is LoadStep.TOKENIZER)
        async with client.get("/health") as response:
            assert response.status == 503
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == (503, "unavailable_error")
            assert error["message"] == "Loading model"
            assert error["progress"] == {"step": "tokenizer", "num_done": 2, "num_steps": 4}
        async with client.post(CHAT, json={"messages": HELLO}) as response:
            assert response.status == 503
        opened.set()
        await server.wait_opened()
        async with client.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_health_tells_of_an_engine_that_died(toy, monkeypatch):
    """A bug of ours ends the engine; the request gets an error, and health is no longer ok."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug, as told")

    config = ServerConfig(port=0)
    async with (
        running_server(toy, EngineConfig(), config, CARD) as server,
        aiohttp.ClientSession(base_url=server.url) as client,
    ):
        model = await server.wait_opened()
        monkeypatch.setattr(model.engine._parts.step_loop._scheduler, "commit", fail)
        async with client.post(CHAT, json={"messages": HELLO}) as response:
            assert response.status == 500
        await asyncio.to_thread(model.engine._thread.join)
        async with client.get("/health") as response:
            assert response.status == 503
            assert "restart" in (await response.json())["error"]["message"]


async def test_health_tells_of_a_device_that_died(toy, monkeypatch):
    """The driver refuses every call: 503 for the request, for later ones, and for health, with the fix."""
    broken = []

    def fail(*_: object, **__: object) -> None:
        broken.append(True)
        raise RuntimeError("CUDA error: unspecified launch failure")

    streams = "thermocline.kernels.gpu.streams.DeviceStreams"
    monkeypatch.setattr(f"{streams}._probe", lambda _: fail() if broken else None)
    config = EngineConfig(placement=PlacementConfig(trunk_device="torch-cpu", hot_device="none"))
    async with (
        running_server(toy, config, ServerConfig(port=0), CARD) as server,
        aiohttp.ClientSession(base_url=server.url) as client,
    ):
        model = await server.wait_opened()
        monkeypatch.setattr("thermocline.kernels.gpu.layer.attention", fail)
        for _ in range(2):
            async with client.post(CHAT, json={"messages": HELLO}) as response:
                assert response.status == 503
                assert "restart" in (await response.json())["error"]["message"]
            await asyncio.to_thread(model.engine._thread.join)
        async with client.get("/health") as response:
            assert response.status == 503
            assert "launch failure" in (await response.json())["error"]["message"]


async def test_a_model_that_can_not_be_opened_ends_the_server(tmp_path):
    """The opener's error comes out of serve, after the socket was closed."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    urls = []
    with pytest.raises(ModelFileError):
        await serve(path, EngineConfig(), ServerConfig(port=0), CARD, urls.append)
    assert len(urls) == 1


async def test_stopping_lets_running_answers_end(toy):
    """New connections are refused at once, the running stream gets its [DONE]."""
    async with live(toy) as server:
        fields = {"stream": True, "max_tokens": 50, **ENDLESS}
        reader, writer = await server.connect(TEXT, **fields)
        await server.until_requests(1)
        port = int(server.server.url.rpartition(":")[2])
    assert parse_events(await body_of(reader))[-1] == "[DONE]"
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_stopping_does_not_wait_for_ever(toy):
    """When the time is up, a stream ends with an error event, a whole answer with 503."""
    config = ServerConfig(port=0, shutdown_timeout_s=0.01)
    async with running_server(toy, EngineConfig(), config, CARD) as server:
        opened = await server.wait_opened()
        client = Live(server, opened.engine, None)
        reader, writer = await client.connect(TEXT, stream=True, **ENDLESS)
        await reader.readuntil(b"\r\n\r\n")
        whole, other = await client.connect(TEXT, **ENDLESS)
        await client.until_requests(2)
    *_, last = parse_events(await chunks_of(reader))
    assert json.loads(last)["error"]["type"] == "unavailable_error"
    assert b" 503 " in await whole.readline()
    for each in (writer, other):
        each.close()


async def test_a_port_that_is_taken_is_a_config_error(toy):
    """The error names the address and the way out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"--port"):
            async with running_server(toy, EngineConfig(), config, CARD):
                pass


@pytest.mark.slow
async def test_the_fingerprint_tells_files_apart(tmp_path, toy, small_toy):
    """One file, one fingerprint; another file, another."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(toy.read_bytes())
    found = []
    for path in (toy, copy, small_toy, write_toy_model(tmp_path / "again.gguf")):
        async with live(path) as server:
            found.append((await server.chat(max_tokens=1))["system_fingerprint"])
    assert found[0] == found[1]
    assert len(set(found)) == 3
