"""What /metrics shows, read by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import CARD, CHAT, HELLO, TEXT, live, until
from thermocline import EngineConfig, PlacementConfig, RemoteConfig
from thermocline.engine import thread as engine_thread
from thermocline.server.app import running_server
from thermocline.server.core.settings import ServerConfig
from thermocline.server.metrics.telemetry import TELEMETRY

# Names that dashboards are made with; those with a dot are label values.
NAMES = {
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_seconds_total",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "requests_processing",
    "requests_deferred",
    "kv_cache_usage_ratio",
    "time_to_first_token_seconds_bucket",
    "time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "queue_time_seconds_bucket",
    "event_loop_lag_seconds_bucket",
    "request_success_total",
    "prefix_cache_hits_total",
    "expert_selected_total",
    "expert_resident",
    "expert_cache_hits_total",
    "expert_cache_misses_total",
    "prefetch_issued_total",
    "prefetch_late_total",
    "page_faults_total",
    "resident_memory_bytes",
    "connections",
    "slow_readers_total",
}


async def scrape(client: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """Return the samples as {(name without prefix, label values...): value}."""
    async with client.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    return {
        (sample.name.removeprefix("thermocline:"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_figures_of_answers(toy):
    """Tokens, ends and times of a stream and of a whole answer with two choices."""
    async with live(toy) as server:
        usage = (await server.chat(max_tokens=5, ignore_eos=True, n=2))["usage"]
        await server.stream(CHAT, messages=HELLO, max_tokens=5, ignore_eos=True)
        found = await scrape(server.client)
        assert {name for name, *_ in found} >= NAMES
        assert found["tokens_predicted_total",] == 15
        asked = 3 * usage["prompt_tokens"]
        assert found["prompt_tokens_total",] + found["prompt_tokens_cached_total",] == asked
        assert found["request_success_total", "length"] == 3
        assert found["time_to_first_token_seconds_count",] == 3
        assert found["time_per_output_token_seconds_count",] == 3 * 4
        assert found["e2e_request_latency_seconds_sum",] > 0
        assert found["expert_selected_total", "cold"] > 0
        assert found["requests_processing",] == found["requests_deferred",] == 0


@pytest.mark.slow
async def test_every_interface_is_counted(toy):
    """However it was asked, an answer is counted once, and a key is asked for in the interface's words."""
    say = {"messages": HELLO, "model": CARD.id}
    ways = {
        CHAT: say,
        TEXT: {"prompt": "a", "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 16, "model": CARD.id},
        "/v1/messages": say | {"max_tokens": 2},
        "/api/chat": say | {"stream": False, "options": {"num_predict": 2}},
    }
    async with live(toy) as server:
        for number, (path, fields) in enumerate(ways.items(), 1):
            status, body = await server.post(path, **{"max_tokens": 2} | fields)
            assert status == 200, body
            found = await scrape(server.client)
            ended = [
                value for (name, *_), value in found.items() if name == "request_success_total"
            ]
            assert sum(ended) == number, path


async def test_running_and_failed_requests(toy, gate):
    """A request counts as running until it leaves, and then as left; refused ones have their reason."""
    async with live(toy) as server:
        _, writer = await server.connect(TEXT, prompt="a" * 40, ignore_eos=True)
        await server.until_requests(1)
        found = await scrape(server.client)
        assert found["requests_processing",] + found["requests_deferred",] == 1
        writer.close()
        await server.until_in_flight(0)
        assert (await server.post(TEXT, prompt=""))[0] == 400
        gate.open()
        await server.until_requests(0)
        found = await scrape(server.client)
        assert found["request_failure_total", "abort"] == 1
        assert found["request_failure_total", "refused"] == 1


async def test_figures_before_the_model_is_open(toy, monkeypatch):
    """The process can be watched while it loads."""
    opened = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = engine_thread.load_parts

    def slow(*args):
        asyncio.run_coroutine_threadsafe(opened.wait(), loop).result(10)
        return real(*args)

    monkeypatch.setattr(engine_thread, "load_parts", slow)
    async with (
        running_server(toy, EngineConfig(), ServerConfig(port=0), CARD) as server,
        aiohttp.ClientSession(base_url=server.url) as client,
    ):
        found = await scrape(client)
        assert found["is_ready",] == 0
        assert found["resident_memory_bytes",] > 0
        opened.set()
        await server.wait_opened()
        assert (await scrape(client))["is_ready",] == 1


@pytest.mark.slow
async def test_a_device_s_cache_is_counted(toy):
    """Hits, what was copied, and how full the device is; beside the same of the memory."""
    split = EngineConfig(placement=PlacementConfig(hot_device="simulated", expert_cache="static"))
    async with live(toy, split) as server:
        await server.chat(max_tokens=5, ignore_eos=True)
        found = await scrape(server.client)
        hits, misses = (
            found[f"expert_cache_{name}_total", "device"] for name in ("hits", "misses")
        )
        assert hits > 0
        assert hits == found["expert_selected_total", "hot"]
        assert misses == found["expert_selected_total", "cold"]
        assert found["expert_cache_uploads_total",] == found["expert_resident", "hot"] > 0
        assert found["expert_cache_upload_bytes_total",] == found["expert_cache_bytes", "used"]
        assert found["expert_cache_evictions_total",] == 0
        assert ("expert_cache_hits_total", "memory") in found
        # The first token is the prompt's.
        num_layers = 4 * server.engine.statistics().heat.shape[0]
        assert found["expert_cache_layers_total",] == num_layers
        num_hot = found["expert_cache_layer_hits_total",]
        assert 0 < num_hot < num_layers
        assert found["expert_cache_layer_hit_ratio",] == num_hot / num_layers


async def test_a_stalled_loop_shows(toy):
    """What blocks the loop is seen as lag; on a busy machine not all of it is the server's own."""
    async with live(toy) as server:
        lag = server.server.app[TELEMETRY].lag.lag
        await until(lambda: len(lag) > 0)
        stall(0.25)
        before = len(lag)
        await until(lambda: len(lag) > before)
        found = await scrape(server.client)
        assert (
            found["event_loop_lag_seconds_count",] > found["event_loop_lag_seconds_bucket", "0.1"]
        )


def stall(seconds: float) -> None:
    """Hold the loop for so long."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


async def test_a_server_without_requests_has_all_families(toy):
    """No division by what is not there yet."""
    async with live(toy) as server:
        found = await scrape(server.client)
        assert found["time_to_first_token_seconds_count",] == 0


@pytest.mark.slow
async def test_workers_are_counted_and_shown(toy):
    """Calls, bytes and state of a worker are in /metrics and /props; without workers /props says so."""
    config = EngineConfig(remote=RemoteConfig(("local:1",)))
    async with live(toy, config) as server:
        await server.chat(max_tokens=4)
        samples = await scrape(server.client)
        assert samples["worker_ready", "0"] == 1
        assert samples["worker_calls_total", "0"] > 0
        assert samples["worker_received_bytes_total", "0"] > 0
        assert samples["worker_failures_total", "0"] == 0
        assert samples["worker_link_bytes_per_second", "0"] >= 0
        assert {("worker_fallbacks_total",), ("worker_hedges_total",)} <= samples.keys()
        assert samples["expert_resident", "remote"] > 0
        async with server.client.get("/props") as response:
            shown = (await response.json())["expert_workers"]
        assert (shown["on_failure"], shown["workers"][0]["failures"]) == ("cpu", 0)
        assert [worker["state"] for worker in shown["workers"]] == ["ready"]
    async with live(toy) as server, server.client.get("/props") as response:
        assert (await response.json())["expert_workers"] is None
