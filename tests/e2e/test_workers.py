"""With workers, tokens and logits are the same to the bit, whatever the split and whatever fails."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import PLACED_CASES
from tests.support.engine_runs import greedy_tokens, prompt_logits
from tests.support.processes import child_pids
from tests.support.remote_cases import running_worker
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    RemoteConfig,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from thermocline.errors import ConfigError, RemoteError, StageError
from thermocline.experts.dispatch.offload_selector import OffloadSelector
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 256, 75)]
MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
SHAPE = ToyShape(layers=2, hidden=256, heads=4, head_dim=64, intermediate=256, used=3, formats=MIX)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of quantised experts."""
    return write_toy_model(tmp_path_factory.mktemp("workers") / "toy.gguf", SHAPE)


def config(remote=None, *, hot="none", trace=False):
    """An engine's settings with these workers."""
    return EngineConfig(
        placement=PlacementConfig(hot_device=hot),
        scheduler=SchedulerConfig(prefill_chunk_tokens=32),
        remote=remote or RemoteConfig(),
        trace=TraceConfig(enabled=trace),
    )


async def tokens_and_logits(path, settings):
    """Answer and score, and return both with the counters of the workers and the trace."""
    async with Engine.open(path, settings) as engine:
        tokens = await greedy_tokens(engine, PROMPT, 12)
        logits = await prompt_logits(engine, PROMPT + tokens)
        await engine.check_integrity()
        return tokens, logits, engine.statistics().remote, engine.trace_events()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "mode", "transport", "hot", "capacity", "share"),
    [
        (1, "batched", "shared", "none", 4096, 0.5),
        (1, "batched", "stream", "cpu", 5, 1.0),
        (1, "auto", "shared", "none", 4096, 1.0),
        (2, "auto", "shared", "simulated", 7, 0.5),
        (2, "stream", "stream", "none", 4096, 1.0),
    ],
)
async def test_workers_change_no_bit(
    path, num_workers, mode, transport, hot, capacity, share, monkeypatch
):
    """Workers x mode x transport x placement x capacity: tokens equal and logits bit-identical.

    No chunk is left to the CPU, whatever is measured to be faster.
    """
    monkeypatch.setattr(OffloadSelector, "offloads", lambda *_: True)
    expected = await tokens_and_logits(path, config())
    assert len(set(expected[0])) > 3, "a model that repeats one token proves nothing"
    # With "cpu" a worker that others keep from running could be late with all of them.
    remote = RemoteConfig(
        workers=("local:1",) * num_workers,
        mode=mode,
        transport=transport,
        batch_capacity=capacity,
        share=share,
        on_failure="error",
    )
    tokens, logits, figures, events = await tokens_and_logits(
        path, config(remote, hot=hot, trace=True)
    )
    assert tokens == expected[0]
    np.testing.assert_array_equal(logits, expected[1])
    assert not any(worker.total_failures for worker in figures.workers)  # one may have been late
    assert all(worker.total_calls > 0 for worker in figures.workers)
    spans = [event for event in events if isinstance(event, SpanEvent)]
    shown = {event.index for event in spans if event.lane is Lane.REMOTE}
    assert shown == set(range(num_workers))


@pytest.mark.slow
@pytest.mark.parametrize("case", PLACED_CASES, ids=str)
async def test_every_architecture_has_its_bits_in_three_places(tmp_path, case):
    """Experts here, on a worker and on a device: the tokens and scores of all of them here."""
    path = write_toy_arch(tmp_path / "toy.gguf", replace(case.toy, context=160))
    expected = await tokens_and_logits(path, config())
    with running_worker(path, tmp_path / "socket") as worker:
        remote = RemoteConfig(workers=(str(worker.address),), share=0.5, on_failure="error")
        settings = config(remote, hot="simulated")
        placement = replace(settings.placement, expert_cache="static", hot_fraction=0.5)
        found = await tokens_and_logits(path, replace(settings, placement=placement))
    tokens, logits, figures, _ = found
    assert tokens == expected[0]
    np.testing.assert_array_equal(logits, expected[1])
    assert not any(worker.total_failures for worker in figures.workers)  # one may have been late
    assert all(worker.total_calls > 0 for worker in figures.workers)


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["f16", "bf16"])
async def test_half_width_payloads_are_close(path, payload):
    """Logits with half-width payloads are within a stated distance of the exact ones."""
    async with Engine.open(path, config()) as engine:
        expected = await prompt_logits(engine, PROMPT)
    async with Engine.open(
        path, config(RemoteConfig(("local:1",), payload=payload, mode="batched"))
    ) as engine:
        logits = await prompt_logits(engine, PROMPT)
    error = np.square(logits - expected).mean() / np.square(expected).mean()
    assert 0 < error < {"f16": 1e-4, "bf16": 1e-3}[payload]


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_worker_changes_no_token(path, blow, caplog):
    """Killed or stopped in the middle of an answer: right tokens by the local path, counted and logged once."""
    before = child_pids()
    expected = (await tokens_and_logits(path, config()))[0]
    remote = RemoteConfig(("local:1",), timeout_s=0.3, mode="batched")
    async with Engine.open(path, config(remote)) as engine:
        (pid,) = child_pids() - before
        tokens = []
        async for event in engine.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)):
            tokens += event.token_ids
            if len(tokens) == 3:
                os.kill(pid, blow)
        assert tokens == expected
        assert await greedy_tokens(engine, PROMPT, 12) == expected
        figures = engine.statistics().remote
        assert figures.total_fallbacks > 0
        assert figures.workers[0].last_error
        await engine.check_integrity()
    lines = [record for record in caplog.records if record.name == "thermocline.remote"]
    assert 1 <= len(lines) <= 2
    assert child_pids() == before


@pytest.mark.slow
async def test_a_lost_worker_is_one_clean_error_where_that_was_asked_for(path):
    """--on-worker-failure error: the request fails with its cause, and one after the restart works."""
    before = child_pids()
    expected = (await tokens_and_logits(path, config()))[0]
    remote = RemoteConfig(("local:1",), on_failure="error", mode="batched")
    async with Engine.open(path, config(remote)) as engine:
        (pid,) = child_pids() - before
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StageError, match="remote") as caught:
            await greedy_tokens(engine, PROMPT, 12)
        assert isinstance(caught.value.__cause__, RemoteError)
        while engine.statistics().remote.workers[0].state != "ready":  # noqa: ASYNC110 - the counters are all that tells
            await asyncio.sleep(0)
        assert await greedy_tokens(engine, PROMPT, 12) == expected
        await engine.check_integrity()
    assert child_pids() == before


@pytest.mark.slow
async def test_a_worker_that_is_not_there(path, tmp_path):
    """Nobody at the address: an error at opening if that was asked for, else everything is computed here."""
    nobody = (f"unix:{tmp_path / 'nobody'}",)
    with pytest.raises(RemoteError, match="can not be reached"):
        async with Engine.open(path, config(RemoteConfig(nobody, on_failure="error"))):
            pass
    expected = (await tokens_and_logits(path, config()))[0]
    tokens, _, figures, _ = await tokens_and_logits(path, config(RemoteConfig(nobody)))
    assert tokens == expected
    assert figures.total_fallbacks > 0


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"workers": ("nowhere",)}, "names no worker"),
        ({"workers": ("tcp:127.0.0.1:9",)}, "--worker-secret-file"),
        ({"share": 1.5}, "--worker-share"),
        ({"mode": "slow"}, "--worker-mode"),
        ({"payload": "f8"}, "--worker-payload"),
        ({"batch_capacity": 0}, "--worker-batch-capacity"),
        ({"timeout_s": 0}, "--worker-timeout"),
    ],
)
async def test_settings_that_can_not_be_are_refused(path, wrong, reason):
    """One wrong setting, one ConfigError that names its flag."""
    with pytest.raises(ConfigError, match=reason):
        async with Engine.open(path, config(RemoteConfig(**wrong))):
            pass
