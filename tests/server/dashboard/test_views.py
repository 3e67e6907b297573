"""The own views over HTTP: experts, placement, timeline, live feed."""

from __future__ import annotations

import asyncio
import gzip
import json

import msgspec
import pytest

from tests.server.live import CARD, CHAT, HELLO, live, until
from thermocline import EngineConfig
from thermocline.cli.live_events import LiveEvent
from thermocline.config import PlacementConfig, TraceConfig
from thermocline.server.core.backend import Backend
from thermocline.server.dashboard import recording
from thermocline.server.dashboard.routes import DASHBOARD
from thermocline.server.dashboard.state import LiveView
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.events import AsyncSpanEvent, SpanEvent
from thermocline.traces.lanes import Track

SPLIT = EngineConfig(placement=PlacementConfig(hot_device="simulated", expert_cache="static"))


async def get(server, path: str, status: int = 200):
    """Return the JSON body of a GET."""
    async with server.client.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def event_of(response) -> dict:
    """Return the next event of a stream."""
    async with asyncio.timeout(10):
        while not (line := await response.content.readline()).startswith(b"data: "):
            assert line, "the stream ended"
    return json.loads(line[6:])


@pytest.mark.slow
async def test_experts_are_counted_per_layer(toy):
    """Every token of prompt and answer chose two experts in each of the two layers."""
    async with live(toy, SPLIT) as server:
        usage = (await server.chat(max_tokens=5, ignore_eos=True))["usage"]
        body = await get(server, "/experts")
        num_tokens = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert body["choices"] == num_tokens * 2 * 2
        assert [sum(layer["counts"]) for layer in body["layers"]] == [num_tokens * 2] * 2
        assert 0 < body["hot_share"] < 1
        (one,) = (await get(server, "/experts?layer=1&format=summary"))["layers"]
        assert one["layer"] == 1
        assert "counts" not in one


@pytest.mark.parametrize(
    "query", ["layer=2", "layer=-1", "layer=x", "layer=1e3", "layer=99999999999", "format=xml"]
)
async def test_a_wrong_question_is_a_400_that_names_it(toy, query):
    """Layers that are not there and formats that do not exist."""
    async with live(toy) as server:
        error = (await get(server, f"/experts?{query}", 400))["error"]
        assert error["param"] == query.partition("=")[0]


async def test_placement_adds_up_to_the_model(toy):
    """Trunk, hot and cold experts are the whole model, and the hot ones are where the config put them."""
    async with live(toy, SPLIT) as server:
        body = await get(server, "/placement")
        assert sum(tier["bytes"] for tier in body["tiers"]) == body["total_bytes"]
        assert {tier["tier"] for tier in body["tiers"]} == {"trunk", "hot", "cold"}
        assert [len(layer) for layer in body["hot"]] == [4, 4]
        assert body["process_bytes"] > 0


@pytest.mark.slow
async def test_a_timeline_is_recorded_between_start_and_stop(toy, tmp_path):
    """The window holds its request and no other; it is there as JSON, gzipped, as data and as a page."""
    async with live(toy) as server:
        await server.chat(max_tokens=2)
        assert (await get(server, "/trace/last", 404))["error"]["code"] == "no_trace"
        status, started = await server.post("/trace/start")
        assert (status, started["recording"]) == (200, True)
        await server.chat(max_tokens=2)
        status, stopped = await server.post("/trace/stop")
        assert (status, stopped["window"]) == (200, started["window"])
        await server.chat(max_tokens=2)
        async with server.client.get("/trace/last.json.gz") as response:
            assert response.content_type == "application/gzip"
            file = tmp_path / "last.json.gz"
            file.write_bytes(await response.read())
        trace = read_chrome(file)
        assert len(trace.events) == stopped["events"]
        requests = [event for event in trace.events if isinstance(event, AsyncSpanEvent)]
        assert [event.span_id for event in requests] == [2]
        plain = await get(server, "/trace/last")
        assert plain == json.loads(gzip.decompress(file.read_bytes()))
        assert (await get(server, "/trace/last?format=timeline"))["report"]["wall_ns"] > 0
        async with server.client.get("/trace/last?format=html") as response:
            policy = response.headers["Content-Security-Policy"]
            assert "script-src 'sha256-" in policy
            assert "unsafe" not in policy
            assert policy in await response.text()


@pytest.mark.slow
async def test_a_timeline_is_packed_once_for_all_readers(toy, monkeypatch):
    """Sixteen readers at once, of whom one leaves, and one that comes later share the work; a new window is packed anew."""
    packed, encode = [], recording.encode_chrome

    def counted(events, **options):
        packed.append(len(events))
        return encode(events, **options)

    monkeypatch.setattr(recording, "encode_chrome", counted)
    async with live(toy) as server:

        async def read() -> bytes:
            async with server.client.get("/trace/last.json.gz") as response:
                return await response.read()

        for window in (1, 2):
            await server.post("/trace/start")
            await server.chat(max_tokens=2)
            await server.post("/trace/stop")
            readers = [asyncio.create_task(read()) for _ in range(16)]
            leaving = asyncio.create_task(read())
            await asyncio.sleep(0)
            leaving.cancel()
            found = {await reader for reader in readers} | {await read()}
            assert (len(found), len(packed)) == (1, window)


async def test_the_feed_has_no_head(toy):
    """HEAD, whose answer could not end, is refused; GET is not."""
    async with live(toy) as server, server.client.head("/events") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET")


async def test_a_window_begins_once_and_ends_once(toy):
    """Of ten starts at once one succeeds, so do the stops; the others are 409 with a code."""
    async with live(toy) as server:
        for path in ("/trace/start", "/trace/stop"):
            answers = await asyncio.gather(*(server.post(path) for _ in range(10)))
            assert sorted(status for status, _ in answers) == [200] + [409] * 9
            codes = {body["error"]["code"] for status, body in answers if status == 409}
            assert codes == {"trace_state"}
        assert not server.engine.is_tracing


async def test_an_engine_that_records_for_itself_is_left_alone(toy):
    """What the config began is not the server's to end."""
    async with live(toy, EngineConfig(trace=TraceConfig(enabled=True))) as server:
        assert (await server.post("/trace/start"))[0] == 409
        assert (await server.post("/trace/stop"))[0] == 409
        assert server.engine.is_tracing


@pytest.mark.slow
async def test_busy_shares_are_those_of_the_timeline(toy):
    """The always-on counters grow by what the spans of the same time add up to, lane by lane."""
    async with live(toy, SPLIT) as server:
        engine = server.engine
        before = engine.busy_ns()
        engine.start_trace()
        await server.chat(max_tokens=30, ignore_eos=True)
        await server.settle()
        trace, _ = engine.stop_trace()
        after = engine.busy_ns()
        spans: dict[Track, int] = {}
        for event in trace.events:
            if isinstance(event, SpanEvent):
                track = Track(event.lane, event.index)
                spans[track] = spans.get(track, 0) + event.end_ns - event.start_ns
        for track, span_ns in spans.items():
            counted_ns = after[track] - before[track]
            # A lane's own job is a little longer than its span.
            assert 0.98 * span_ns <= counted_ns <= 1.5 * span_ns + 2_000_000, track
        assert {track.label for track in spans} >= {"loop", "cpu 0", "hot", "gpu.h2d"}


@pytest.mark.slow
async def test_events_tell_what_the_server_does(toy):
    """Ready, with lanes, requests and tokens; the producer ends when the reader leaves."""
    async with live(toy) as server:
        feed = server.server.app[DASHBOARD].feed
        assert "idle" in repr(feed)
        async with server.client.get("/events") as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            first = await event_of(response)
            assert (first["state"], first["model"]) == ("ready", CARD.id)
            assert {lane["lane"] for lane in first["lanes"]} >= {"loop", "cpu 0"}
            async with server.client.post(
                CHAT, json={"messages": HELLO, "stream": True, "ignore_eos": True}
            ) as answer:
                await answer.content.readline()
                while not (event := await event_of(response))["tokens"]["output_per_second"]:
                    pass
                assert event["queue"]["running"] == 1
                assert event["requests"][0]["state"] in ("prefill", "decode")
                assert all(0 <= lane["busy"] <= 1 for lane in event["lanes"])
                assert any(lane["busy"] > 0 for lane in event["lanes"] if lane["work"])
        await until(lambda: "idle" in repr(feed))


async def test_the_server_s_end_ends_the_stream(toy):
    """A reader of events does not hold the shutdown, and sees a clean end."""
    async with live(toy, shutdown_timeout_s=60.0) as server:
        response = await server.client.get("/events")
        await event_of(response)
        ended = asyncio.create_task(response.read())
        await server.server.app.shutdown()
        async with asyncio.timeout(5):
            await ended


async def test_events_are_there_before_and_after_the_model(toy, tmp_path):
    """While it is opened, after it was closed, and when it could not be opened at all."""

    async def state(backend: Backend) -> dict:
        made = (await LiveView(lambda: backend).make()).removeprefix(b"data: ")
        msgspec.json.decode(made, type=LiveEvent)  # what `thermocline top` reads
        return json.loads(made)

    backend = Backend(toy, EngineConfig(), CARD)
    loading = await state(backend)
    assert loading["state"] == "loading"
    assert (loading["load"]["step"], loading["load"]["done"]) == (None, 0)
    backend.start()
    await backend.wait_opened()
    assert (await state(backend))["state"] == "ready"
    await backend.close()
    assert (await state(backend))["state"] == "stopped"
    nothing = tmp_path / "nothing.gguf"
    nothing.write_bytes(b"no model")
    failing = Backend(nothing, EngineConfig(), CARD)
    failing.start()
    with pytest.raises(Exception, match=r"nothing\.gguf"):
        await failing.wait_opened()
    failed = await state(failing)
    assert failed["state"] == "failed"
    assert "nothing.gguf" in failed["error"]
    await failing.close()
