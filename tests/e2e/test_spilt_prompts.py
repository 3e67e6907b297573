"""A second tier of the prompt cache in a running engine: evicted prompts come back, and no bit differs."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.support.arch_cases import (
    DEEPSEEK4_CASE,
    SCHEDULED_CASES,
    SPARSE_CASE,
    STREAMS_CASE,
)
from tests.support.engine_runs import greedy_tokens
from tests.support.settled import settled
from tests.support.toy_archs import ToyArch, write_toy_arch
from thermocline import Engine, EngineConfig, SamplingParams, SchedulerConfig
from thermocline.config import MemoryConfig
from thermocline.errors import ConfigError
from thermocline.pipeline import spilling
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from pathlib import Path

CASES = {case.toy.arch: case.toy for case in SCHEDULED_CASES}
TOYS = {
    "plain": CASES["olmoe"],
    "windowed": ToyArch("laguna", layers=5, rotary=8, window=24, context=2048, head_dim=32),
    "recurrent": CASES["qwen35moe"],
    "latent": CASES["deepseek2"],
    "sparse": SPARSE_CASE.toy,
    "shared": CASES["gemma4"],
    "streams": STREAMS_CASE.toy,
    "entries": DEEPSEEK4_CASE.toy,
}
CONTEXT = 96
FIRST, SECOND, THIRD = ([(7 * n + n * n + start) % 256 for n in range(70)] for start in (1, 2, 3))
SIZES = {
    "memory": {"spill_bytes": 8 << 20},
    "file": {"spill_disk_bytes": 8 << 20},
    "both": {"spill_bytes": 60 << 10, "spill_disk_bytes": 8 << 20},
}


@pytest.fixture(scope="module", params=TOYS)
def toy(request, tmp_path_factory):
    return write_toy_arch(
        tmp_path_factory.mktemp("toy") / f"{request.param}.gguf", TOYS[request.param]
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_toy_arch(tmp_path_factory.mktemp("toy") / "toy.gguf", TOYS["plain"])


class Done:
    """A job that was done when it was given."""

    def __init__(self, result: object) -> None:
        self.result = lambda: result
        self.cancelled = bool
        self.exception = lambda: None

    def add_done_callback(self, callback) -> None:
        callback(self)


class AtOnce:
    """Does each job when it is given: a toy's chunks, of a millisecond, would outrun a thread."""

    def __init__(self) -> None:
        self.call_soon = asyncio.get_running_loop().call_soon

    def run_in_executor(self, _, job, *args) -> Done:
        return Done(job(*args))


@pytest.fixture
def at_once(monkeypatch):
    """Let the second tier do its jobs at once."""
    monkeypatch.setattr(spilling, "asyncio", SimpleNamespace(get_running_loop=AtOnce))


def config(folder=None, **memory: object) -> EngineConfig:
    """Return a config with a cache of one context: of two prompts it keeps little more than one."""
    sizes = {
        "max_context_tokens": CONTEXT,
        "max_full_contexts": 1,
        "block_tokens": 8,
        "max_windows": 1,
        "max_snapshots": 1,
    }
    given = sizes | memory | ({} if folder is None else {"spill_dir": str(folder)})
    return EngineConfig(
        memory=MemoryConfig(**given),
        scheduler=SchedulerConfig(prefill_chunk_tokens=16, expected_answer_tokens=0),
    )


def blocks_of(path: Path) -> dict[str, int]:
    """Return what to set for a toy whose blocks can not be as small as the others'."""
    return {"block_tokens": 16} if path.stem == "entries" else {}


async def ask(engine: Engine, prompt: list[int]) -> tuple[int, list[object]]:
    """Return how many tokens of a prompt were found, and its answer with log-probabilities; all copies are made then."""
    before = (await engine.snapshot()).cache.total_hit_tokens
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    answer = [
        token
        async for event in engine.generate(prompt, params)
        for token in zip(event.token_ids, event.logprobs, event.top_logprobs, strict=True)
    ]
    await settled(engine)
    return (await engine.snapshot()).cache.total_hit_tokens - before, answer


async def turns(engine: Engine) -> list[tuple[int, list[object]]]:
    """Three conversations that push each other out, then the first again."""
    return [await ask(engine, prompt) for prompt in (FIRST, SECOND, THIRD, FIRST)]


@pytest.mark.slow
@pytest.mark.parametrize("tier", SIZES)
async def test_an_evicted_prompt_comes_back_to_the_bit(toy, tier, tmp_path, at_once):
    """From memory, from the file, and from both; all its blocks but that of the last token."""
    folder = None if tier == "memory" else tmp_path
    blocks = blocks_of(toy)
    async with Engine.open(toy, config(**blocks)) as engine:
        without = await turns(engine)
    async with Engine.open(toy, config(folder, **SIZES[tier], **blocks)) as engine:
        found = await turns(engine)
        spill = engine.statistics().spill
    assert without[3][0] == 0
    assert found[3][0] == 64
    assert [answer for _, answer in found] == [answer for _, answer in without]
    assert (spill.total_returns, spill.total_returned_tokens > 0) == (1, True)
    assert spill.levels == {"memory": ("memory",), "file": ("disk",)}.get(tier, ("memory", "disk"))
    assert all(
        used <= most for used, most in zip(spill.used_bytes, spill.capacity_bytes, strict=True)
    )
    assert all(spill.used_bytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_many_conversations_at_once_are_what_they_are_alone(toy, tmp_path):
    """Prompts of five beginnings come, wait, lose their places and come back, two of them at a time."""
    stems = [[(5 * n + start * n * n + start) % 256 for n in range(60)] for start in range(1, 6)]
    prompts = [stem[: 30 + 6 * turn] for turn in range(5) for stem in stems]
    async with Engine.open(
        toy, replace(config(**blocks_of(toy)), scheduler=SchedulerConfig(prefix_cache=False))
    ) as engine:
        alone = [await greedy_tokens(engine, prompt, 5) for prompt in prompts]
    async with Engine.open(
        toy, config(tmp_path, spill_bytes=200 << 10, spill_disk_bytes=8 << 20, **blocks_of(toy))
    ) as engine:
        answers = []
        for start in range(0, len(prompts), 5):
            several = prompts[start : start + 5]
            answers += await asyncio.gather(*(greedy_tokens(engine, p, 5) for p in several))
        await settled(engine)
        assert engine.statistics().spill.total_returns > 0
    assert answers == alone


def file_of(engine: Engine) -> int:
    """Return the descriptor of the tier's file."""
    return engine._parts.step_loop.spilling._store._file.descriptor


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["changed", "cut"])
async def test_a_damaged_file_costs_time_and_no_answer(plain, damage, tmp_path, caplog, at_once):
    """What is not what was written is computed again, and the log says so."""
    async with Engine.open(plain, config(tmp_path, spill_disk_bytes=8 << 20)) as engine:
        answers = [await ask(engine, prompt) for prompt in (FIRST, SECOND, THIRD)]
        size = os.fstat(file_of(engine)).st_size
        if damage == "cut":
            os.ftruncate(file_of(engine), 0)
        else:
            os.pwrite(file_of(engine), bytes(size), 0)
        found, again = await ask(engine, FIRST)
        assert (found, again) == (0, answers[0][1])
        assert engine.statistics().spill.total_damaged > 0
        assert "the prompt is computed again" in caplog.text
        # What is written after that is whole.
        for prompt in (SECOND, THIRD):
            await ask(engine, prompt)
        assert await ask(engine, FIRST) == (64, again)


@pytest.mark.slow
async def test_a_full_disk_is_a_warning(plain, tmp_path, monkeypatch, caplog):
    """What was written stays of use; what was not is computed again, and one line says so."""
    write = os.pwritev

    def some(descriptor, views, offset):
        if offset > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", some)
    async with Engine.open(plain, config(tmp_path, spill_disk_bytes=8 << 20)) as engine:
        first = await turns(engine)
        spill = engine.statistics().spill
        assert first[3][1] == first[0][1]
    assert 0 < spill.capacity_bytes[0] < 30_000
    assert caplog.text.count("can not be spilt further") == 1
    assert "No space left on device" in caplog.text


@pytest.mark.slow
async def test_the_timeline_shows_what_is_copied_and_read(plain, at_once):
    """On a lane of its own, with the bytes."""
    async with Engine.open(plain, config(spill_bytes=8 << 20)) as engine:
        engine.start_trace()
        found = await turns(engine)
        trace, _ = engine.stop_trace()
    spans = [e for e in trace.events if isinstance(e, SpanEvent) and e.lane is Lane.SPILL]
    assert found[3][0] == 64
    assert {span.name for span in spans} == {Name.COPY, Name.LOAD}
    assert all(span.args["bytes"] > 0 for span in spans)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scheduler": SchedulerConfig(prefix_cache=False)}, "leave out --no-prefix-cache"),
        ({"memory": MemoryConfig(spill_dir="/nowhere/at/all")}, "--cache-spill-dir /nowhere"),
    ],
)
async def test_what_can_not_be_is_refused_at_open(plain, wrong, says):
    """With the flag to change."""
    setting = replace(EngineConfig(memory=MemoryConfig(spill_bytes=1 << 20)), **wrong)
    with pytest.raises(ConfigError, match=says):
        async with Engine.open(plain, setting):
            pass


@pytest.mark.slow
async def test_a_cache_on_a_device_is_not_spilt(plain):
    """The error names both ways out."""
    pytest.importorskip("torch")
    base = config(spill_bytes=1 << 20)
    placement = replace(base.placement, trunk_device="torch-cpu")
    with pytest.raises(ConfigError, match="--trunk-device cpu, or leave out"):
        async with Engine.open(plain, replace(base, placement=placement)):
            pass
