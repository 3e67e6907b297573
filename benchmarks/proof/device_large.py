"""Stages of `make gpu-proof` with a model of 48 layers under a cap on the device's memory.

One stage writes the file. In others decoding is timed by share of resident experts, and four ways to use a device take
turns within one engine: experts on the CPU alone, all on the device with uploads, both at once, and prompts as one job of
the device, to which the experts that it lacks are copied meanwhile. `kind` is "cuda", or "torch-cpu" for a rehearsal.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import psutil

from benchmarks.engine_side import engine_config, random_prompt, time_request
from benchmarks.synthetic_model import SHAPES, tensors_of, write_model
from thermocline import Engine
from thermocline.config import PlacementConfig
from thermocline.experts.backends.streamed_device import StreamedDevice
from thermocline.experts.dispatch.offload_selector import OffloadSelector
from thermocline.experts.dispatch.split_rules import FastestSplit
from thermocline.kernels.gpu.streams import DeviceStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from benchmarks.proof.stage import Sink

_SPARE: Final = 1.15  # of the file's bytes, in the folder and in memory
_LEAST_LAYERS: Final = 4
_FILE: Final = "large.gguf"
_GROUP: Final = Path("/sys/fs/cgroup")
_GROUPS: Final = (
    (_GROUP / "memory.max", _GROUP / "memory.current"),
    (_GROUP / "memory/memory.limit_in_bytes", _GROUP / "memory/memory.usage_in_bytes"),
)
_LAST_S: Final = 2.0  # for closing the engine
_STREAMED: Final = "streamed"
WAYS: Final = ("cpu only", "upload only", "co-execution", _STREAMED)


def write(sink: Sink, folder: str, shape: str, layers: int) -> None:
    """Write the model where `folder` and memory have room for it, with fewer layers if they have not."""
    room = min(shutil.disk_usage(folder).free, memory_room())
    while layers > _LEAST_LAYERS and _bytes_of(shape, layers) * _SPARE > room:
        layers //= 2
    if _bytes_of(shape, layers) * _SPARE > room:
        sink("model", ok=False, why=f"{room * 1e-9:.1f} GB are free in the folder or in memory")
        return
    path = write_model(Path(folder) / _FILE, shape, layers=layers)
    sink("model", path.stat().st_size * 1e-9, "GB", why=f"{shape}, {layers} layers")


def memory_room() -> int:
    """Return the bytes of memory that this process may still take: of the machine, and of its group."""
    room = int(psutil.virtual_memory().available)
    for limit, used in _GROUPS:
        try:
            room = min(room, int(limit.read_text("utf-8")) - int(used.read_text("utf-8")))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return room


def _bytes_of(shape: str, layers: int) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(SHAPES[shape], layers, "Q4_K_M"))


def hits(
    sink: Sink,
    kind: str,
    folder: str,
    *,
    share: float,
    cap: int | None,
    contexts: list[int],
    answer: int,
) -> None:
    """Tokens per second behind contexts of each length, with a fixed share of the experts on the device."""
    path = Path(folder) / _FILE
    if not path.exists():
        sink.skip("decode", "the model was not written")
        return
    placement = PlacementConfig(
        hot_device=_device(kind), trunk_device=_device(kind), expert_cache="static",
        hot_fraction=share, hot_choice="even",
    )  # fmt: skip
    with _capped(cap):
        asyncio.run(_hits(sink, path, placement, contexts, answer))


async def _hits(
    sink: Sink, path: Path, placement: PlacementConfig, contexts: list[int], answer: int
) -> None:
    config = engine_config(max(contexts) + answer + 2, None, placement)
    async with Engine.open(path, config) as engine:
        store = engine.statistics().store
        if store is not None:
            sink("experts there", store.num_resident, "experts", why=f"{store.resident_bytes * 1e-9:.1f} GB")  # fmt: skip
        took = _Took(sink)
        for turn in range(3):
            for context in contexts:
                if not took.has_time(str(context)):
                    continue
                sink.running(f"context {context}, turn {turn}")
                before = engine.expert_figures()
                timings = await time_request(engine, _prompt(engine, context, turn), answer)
                counted = engine.expert_figures() - before
                name = f"decode at {context}"
                sink(name, answer / max(timings.decode_s, 1e-9), "tokens/s")
                sink(f"prefill {context}", context / max(timings.prompt_s, 1e-9), "tokens/s")
                sink(f"{name}, hits", _share(counted.hits, counted.misses), "share")


def ways(
    sink: Sink,
    kind: str,
    folder: str,
    *,
    cap: int | None,
    prompts: list[int],
    answer: int,
    rounds: int,
) -> None:
    """Prefill and decode in each way, in turns within one engine, whose experts change places by use."""
    path = Path(folder) / _FILE
    if not path.exists():
        sink.skip("ways", "the model was not written")
        return
    with _capped(cap):
        asyncio.run(_ways(sink, kind, path, prompts, answer, rounds))


async def _ways(
    sink: Sink, kind: str, path: Path, prompts: list[int], answer: int, rounds: int
) -> None:
    placement = PlacementConfig(hot_device=_device(kind), trunk_device=_device(kind))
    config = engine_config(max(prompts) + answer + 2, None, placement)
    async with Engine.open(path, config) as engine:
        await time_request(engine, _prompt(engine, prompts[0], 99), answer)  # compiles
        took = _Took(sink)
        for turn in range(rounds):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                for tokens in prompts:
                    if not took.has_time(f"{way} {tokens}"):
                        continue
                    sink.running(f"{way}, prompt {tokens}, turn {turn}")
                    before = engine.expert_figures()
                    with _way(way) as num_streamed:
                        prompt = _prompt(engine, tokens, turn)
                        timings = await time_request(engine, prompt, answer)
                    if way == _STREAMED and not num_streamed():
                        sink.skip(f"{way}, prefill {tokens}", "no prompt can be streamed here")
                        continue
                    counted = engine.expert_figures() - before
                    sink(f"{way}, prefill {tokens}", tokens / max(timings.prompt_s, 1e-9), "tokens/s")  # fmt: skip
                    sink(f"{way}, decode at {tokens}", answer / max(timings.decode_s, 1e-9), "tokens/s")  # fmt: skip
                    sink(f"{way}, on the device, {tokens}", _share(counted.hits, counted.misses), "share")  # fmt: skip
                    sink(f"{way}, copied, {tokens}", counted.bytes_h2d * 1e-9, "GB")
        store = engine.statistics().store
        if store is not None:
            why = store.reason or f"{store.resident_bytes * 1e-9:.1f} GB"
            sink("experts there at the end", store.num_resident, "experts", why=why)


class _Took:
    """Remembers how long each case took, so that none is begun that would be killed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._longest: dict[str, float] = {}
        self._begun: tuple[str, float] | None = None

    def has_time(self, case: str) -> bool:
        """Whether `case` may be begun; the one before is over."""
        remaining_s = self._sink.remaining_s
        if self._begun is not None:
            name, at_s = self._begun
            self._longest[name] = max(self._longest.get(name, 0.0), at_s - remaining_s)
        is_enough = remaining_s > self._longest.get(case, 0.0) + _LAST_S
        self._begun = (case, remaining_s) if is_enough else None
        return is_enough


def _device(kind: str) -> Any:  # noqa: ANN401 - one of two literals
    return kind


def _prompt(engine: Engine, tokens: int, seed: int) -> list[int]:
    return random_prompt(engine.tokenizer.vocab_size, tokens, seed)


def _share(hits: int, misses: int) -> float:
    return hits / max(hits + misses, 1)


@contextmanager
def _way(name: str) -> Iterator[Callable[[], int]]:
    """Let every chunk meanwhile be computed in one way, and give how many prompts' chunks were streamed by then."""
    num_streamed = 0

    def takes(device: StreamedDevice, _num_tokens: int) -> bool:
        nonlocal num_streamed
        is_taken = name == _STREAMED and device.is_able
        num_streamed += is_taken
        return is_taken

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(StreamedDevice, "takes", takes))
        offloads = name != WAYS[0]
        stack.enter_context(mock.patch.object(OffloadSelector, "offloads", return_value=offloads))
        if name == WAYS[1]:
            stack.enter_context(mock.patch.object(FastestSplit, "split", _all_there))
        yield lambda: num_streamed


def _all_there(
    _self: FastestSplit, _layer: int, resident: NDArray[np.bool_], *_: object
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    return resident, ~resident


@contextmanager
def _capped(cap: int | None) -> Iterator[None]:
    """Let an engine that opens meanwhile have `cap` bytes of the device; None for all, and on torch's CPU."""
    import torch

    if cap is None or not torch.cuda.is_available():
        yield
        return
    real = DeviceStreams.free_bytes
    total = torch.cuda.mem_get_info()[1]

    def free_bytes(streams: DeviceStreams) -> int | None:
        free = real(streams)
        return None if free is None else max(min(free, cap - torch.cuda.memory_reserved()), 0)

    with mock.patch.object(DeviceStreams, "free_bytes", free_bytes):
        torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0))
        yield
