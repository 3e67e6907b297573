"""Stages of `make gpu-proof` with small whole models: equal tokens wherever experts are, and faults that leave no trace.

`kind` is "cuda", or "torch-cpu" for a rehearsal. The CPU's part is computed by the reference kernels, in float32, so
that only the device's arithmetic differs.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np

from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.config import HeatConfig, MemoryConfig, PlacementConfig, SchedulerConfig
from thermocline.demo import DEMO_MODEL_PATH, DEMO_QUESTIONS
from thermocline.errors import DeviceMemoryError, StageError
from thermocline.experts.dispatch.offload_selector import OffloadSelector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.proof.stage import Sink

_MAX_ERROR: Final = 1e-3  # NMSE of logits, as "non-expert/whole models" in the suite's table
_ON_CPU: Final = {"trunk_device": "cpu", "hot_device": "none"}


def _config(placement: dict[str, Any], context: int = 512) -> EngineConfig:
    return EngineConfig(
        placement=PlacementConfig(**placement),
        scheduler=SchedulerConfig(prefix_cache=False),
        memory=MemoryConfig(kv_type="f32", max_context_tokens=context, max_full_contexts=1),
        heat=HeatConfig(enabled=False),
        kernels="reference",
    )


def _placements(kind: str) -> dict[str, dict[str, Any]]:
    static = {"hot_device": kind, "expert_cache": "static"}
    whole = static | {"trunk_device": kind}
    return {
        "non-expert weights there": {"trunk_device": kind, "hot_device": "none"},
        "some layers there": {"trunk_device": kind, "hot_device": "none", "gpu_layers": 3},
        "half of the experts there": static | {"trunk_device": "cpu", "hot_fraction": 0.51},
        "both": whole | {"hot_fraction": 0.51},
        "all experts there": static | {"trunk_device": "cpu", "hot_fraction": 1.0},
        "everything there": whole | {"hot_fraction": 1.0},
        "experts that change places by use": {"hot_device": kind, "trunk_device": kind},
    }


def demo(sink: Sink, kind: str, answer: int, questions: int) -> None:
    """The demo model's answers: the same tokens everywhere, and logits within the tolerance."""
    asked = DEMO_QUESTIONS[:questions]
    expected = asyncio.run(_answers(_ON_CPU, asked, answer))
    sink("cpu alone", len(expected[0]), "tokens")
    for name, placement in _placements(kind).items():
        sink.running(name)
        # A device that is no faster than the CPU would be left alone.
        with mock.patch.object(OffloadSelector, "offloads", return_value=True):
            found = asyncio.run(_answers(placement, asked, answer))
        pairs = zip(found[0], expected[0], strict=True)
        same = sum(ours == theirs for ours, theirs in pairs)
        why = "" if found[0] == expected[0] else f"{same} of {len(expected[0])} tokens are equal"
        sink(f"{name}, equal tokens", same, "tokens", ok=found[0] == expected[0], why=why)
        error = _nmse(found[1], expected[1])
        sink(f"{name}, logits", error, "NMSE", ok=error <= _MAX_ERROR)
        sink(f"{name}, choices on the device", found[2], "share")


async def _answers(
    placement: dict[str, Any], questions: Sequence[str], count: int
) -> tuple[list[int], np.ndarray[Any, Any], float]:
    """Return all answers' tokens, the logits of the first question, and the share of choices on the device."""
    async with Engine.open(DEMO_MODEL_PATH, _config(placement)) as engine:
        tokens: list[int] = []
        first: list[int] = []
        for question in questions:
            prompt = await engine.encode_chat([{"role": "user", "content": question}])
            first = first or list(prompt)
            tokens += await greedy(engine, prompt, count)
        logits = np.concatenate([part.logits async for part in engine.score(first)])
        await engine.check_integrity()
        return tokens, logits, engine.statistics().hot_share


async def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` most likely next tokens; end tokens do not end it."""
    tokens: list[int] = []
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    async with aclosing(engine.generate(prompt, params)) as events:
        async for event in events:
            tokens += event.token_ids
    return tokens


def faults(sink: Sink, kind: str) -> None:
    """No room at the start, memory that runs out in a step, requests that are left: each ends, and the next is served."""
    static = {"hot_device": kind, "trunk_device": kind, "expert_cache": "static"}
    sink.running("no room for an expert")
    try:
        asyncio.run(_open_and_close(static | {"expert_budget_bytes": 1000}))
        sink("no room for an expert is a typed error", ok=False, why="it opened")
    except DeviceMemoryError as error:
        sink("no room for an expert is a typed error", why=str(error)[:120])
    asyncio.run(_out_of_memory(sink, kind, static | {"hot_fraction": 0.5}))
    asyncio.run(_abort(sink, static | {"hot_fraction": 0.5}))


async def _open_and_close(placement: dict[str, Any]) -> None:
    async with Engine.open(DEMO_MODEL_PATH, _config(placement)):
        return


async def _out_of_memory(sink: Sink, kind: str, placement: dict[str, Any]) -> None:
    sink.running("memory runs out")
    async with Engine.open(DEMO_MODEL_PATH, _config(placement, 2048)) as engine:
        prompt = await engine.encode_chat([{"role": "user", "content": DEMO_QUESTIONS[0]}])
        long = (list(prompt) * 100)[:1900]
        expected = await greedy(engine, prompt, 8)
        name = "memory that runs out fails the request with a typed error"
        try:
            with _no_more_memory(kind):
                await greedy(engine, long, 4)
            sink.skip(name, "the request was served from what torch held")
        except StageError as error:
            is_typed = isinstance(error.__cause__, DeviceMemoryError)
            sink(name, ok=is_typed, why=str(error)[:200])
        same = await greedy(engine, prompt, 8) == expected
        sink("the next request is answered as before", ok=same)
        same = await greedy(engine, long, 1) is not None
        sink("the failed request is served when there is memory", ok=same)
        await engine.check_integrity()


@contextmanager
def _no_more_memory(kind: str) -> Iterator[None]:
    """Let torch take no more of the device than it has; on torch's CPU raise what it would raise."""
    import torch

    with ExitStack() as stack:
        if kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            total = torch.cuda.mem_get_info()[1]
            fraction = torch.cuda.memory_reserved() / total
            torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0))
            stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0)
        else:
            error = torch.OutOfMemoryError("tried to allocate 1 GiB. There is none")
            name = "thermocline.kernels.gpu.layer.attention"
            stack.enter_context(mock.patch(name, side_effect=error))
        yield


async def _abort(sink: Sink, placement: dict[str, Any]) -> None:
    """Requests that are left at any point of a step; then the first answer again."""
    sink.running("abort")
    async with Engine.open(DEMO_MODEL_PATH, _config(placement)) as engine:
        prompt = await engine.encode_chat([{"role": "user", "content": DEMO_QUESTIONS[0]}])
        expected = await greedy(engine, prompt, 8)
        for turn in range(20):
            task = asyncio.create_task(greedy(engine, prompt, 100))
            await asyncio.sleep(0.002 * turn)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        same = await greedy(engine, prompt, 8) == expected
        sink("after 20 requests that were left, the answer is as before", ok=same)
        await engine.check_integrity()


def _nmse(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    wanted = expected.astype(np.float64)
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())
