"""Saves the prompt cache of a slot to a file, and restores it. Knows no HTTP.

Blocks are held on the engine's thread while another thread moves their bytes, so that requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from thermocline import __version__
from thermocline.errors import BusyError, ConfigError, EngineError, RequestError
from thermocline.kv.prefix_file import CacheForm, LayerForm, open_prefix, read_prefix, write_prefix
from thermocline.messages import LayerIndex
from thermocline.pipeline.step_loop import StepLoop
from thermocline.remote.holdings import model_digest

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

    from thermocline.engine.assembly import EngineParts
    from thermocline.engine.thread import EngineThread
    from thermocline.kv.kept_prefix import HeldPrefix
    from thermocline.pipeline.replica_loops import AnyStepLoop
    from thermocline.pipeline.scheduling.slots import Slots

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What was saved or restored."""

    num_tokens: int
    num_bytes: int
    seconds: float


class EngineSlots:
    """The slots of one engine, which was opened with `SchedulerConfig.keeps_slots`.

    owner: the beginning of the salt of those requests that may see a slot's tokens; "" is everybody's.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._form: CacheForm | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def save(self, slot: int, path: Path, *, owner: str = "", max_bytes: int) -> SlotReport:
        """Save what the cache has of a slot's tokens. Raises RequestError for an empty slot, and SavedPromptError."""
        self._check(slot)
        return await self._to_its_end(self._save(slot, path, owner, max_bytes))

    async def restore(self, slot: int, path: Path, *, owner: str = "") -> SlotReport:
        """Let requests find what was saved, and make it the slot's.

        Raises SavedPromptError for a file that does not fit, BusyError if requests hold the cache's blocks.
        """
        self._check(slot)
        return await self._to_its_end(self._restore(slot, path, owner))

    async def erase(self, slot: int, *, owner: str = "") -> int:
        """Forget a slot's tokens and free their blocks; return how many tokens it had."""
        self._check(slot)

        def erase(loop: AnyStepLoop) -> int:
            return _slots(loop).erase(slot, owner)

        return await self._thread.call(erase)

    def _check(self, slot: int) -> None:
        parts = self._thread.parts
        slots = _slots(parts.step_loop)
        if not 0 <= slot < slots.num_slots:
            raise RequestError(
                f"there is no slot {slot}: choose 0 to {slots.num_slots - 1} (--max-requests)",
                param="id_slot",
            )
        if parts.experts.devices.device_layers:
            raise ConfigError(
                "the prompt cache is on the GPU, from where it is not saved: start with --trunk-device cpu"
            )

    async def _to_its_end(self, work: Coroutine[Any, Any, R]) -> R:
        """Run what must not stop half-way, also if its caller is cancelled: a thread has blocks meanwhile."""
        task = asyncio.create_task(work, name="slot file")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, in case that the caller has left

    async def _save(self, slot: int, path: Path, owner: str, max_bytes: int) -> SlotReport:
        start_s = time.perf_counter()
        form = await self._cache_form()
        held = await self._thread.call(lambda loop: _slots(loop).hold(slot, owner))
        if held is None:
            raise RequestError(
                f"slot {slot} has no prompt cache: send a request with id_slot {slot} first",
                param="id_slot",
            )
        try:
            cache = self._thread.parts.kept.cache
            num_bytes = await asyncio.to_thread(
                write_prefix, path, form, owner, held, cache, max_bytes
            )
        finally:
            await self._give_back(held)
        num_tokens = len(held.blocks) * form.block_tokens
        return SlotReport(num_tokens, num_bytes, time.perf_counter() - start_s)

    async def _restore(self, slot: int, path: Path, owner: str) -> SlotReport:
        start_s = time.perf_counter()
        form = await self._cache_form()
        saved = await asyncio.to_thread(open_prefix, path, form, owner)
        held = await self._thread.call(
            lambda loop: _slots(loop).begin_restore(saved.tokens, saved.parts)
        )
        if held is None:
            raise BusyError(
                "requests hold the cache, which has no room for the saved prompt: try again when they have ended"
            )
        is_read = False
        try:
            cache = self._thread.parts.kept.cache
            await asyncio.to_thread(read_prefix, path, form, saved, held, cache)
            is_read = True
        finally:
            if not is_read:
                await self._give_back(held)

        def end(loop: AnyStepLoop) -> None:
            _slots(loop).end_restore(slot, owner, held)
            _one(loop).resume_planning()

        await self._thread.call(end)
        num_tokens = len(saved.tokens.token_ids)
        return SlotReport(num_tokens, saved.num_bytes, time.perf_counter() - start_s)

    async def _give_back(self, held: HeldPrefix) -> None:
        def give_back(loop: AnyStepLoop) -> None:
            _slots(loop).give_back(held)
            _one(loop).resume_planning()

        with suppress(EngineError):  # an engine that has ended has no blocks
            await self._thread.call(give_back)

    async def _cache_form(self) -> CacheForm:
        if self._form is None:
            self._form = await asyncio.to_thread(partial(_form_of, self._thread.parts))
        return self._form


def _one(loop: AnyStepLoop) -> StepLoop:
    """Return the only loop. Raises ConfigError for those of several ranks."""
    if isinstance(loop, StepLoop):
        return loop
    raise ConfigError(
        "slots are of one process: under torchrun every replica has a cache of its own"
    )


def _slots(any_loop: AnyStepLoop) -> Slots:
    loop = _one(any_loop)
    if loop.slots is None:
        raise ConfigError("slots are not kept: open the engine with scheduler.keeps_slots")
    return loop.slots


def _form_of(parts: EngineParts) -> CacheForm:
    """Return the form of an engine's cache. Reads a sample of each tensor."""
    spec, kv, states = parts.model.spec, parts.kept.cache.kv, parts.kept.cache.states
    windows = set(spec.window_layers)
    layers = []
    for layer in kv.layers:
        shape = kv.layer(layer).shape
        _, heads, key_bytes = shape.array_shape
        value_bytes = shape.value_shape[2]
        has_window = layer in windows
        key_bytes, value_bytes = heads * key_bytes, heads * value_bytes
        index_bytes = shape.index_shape[1]
        layers.append(LayerForm(layer, key_bytes, value_bytes, has_window, index_bytes))
    return CacheForm(
        __version__,
        model_digest(parts.kept.file, tuple(parts.kept.file.tensors.values())).hex(),
        parts.kernels.name.partition(" ")[0],
        kv.type.name,
        kv.block_tokens,
        tuple(layers),
        () if spec.state is None else tuple(map(LayerIndex, spec.recurrent_layers)),
        (0, 0) if spec.state is None else spec.state.numbers,
        parts.kernels.prompts_differ,
        0 if spec.latent is None else spec.latent.expanded_tokens,
        () if states is None else tuple(shape.numbers for shape in spec.further_states.values()),
        spec.turns_far,
    )
