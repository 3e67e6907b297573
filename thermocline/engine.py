"""The async Python API: opens a model, runs it on a thread of its own, streams answers.

Decides nothing that a part could decide. A page fault or a long kernel stalls only the engine's own
thread, never the caller's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from thermocline.config import EngineConfig
from thermocline.engine_thread import EngineThread
from thermocline.errors import PromptTooLongError, RequestError
from thermocline.kernels.cpu import NativeKernels
from thermocline.machine import machine_facts
from thermocline.messages import PromptLogits, PromptProgress, RequestFailed, RequestId, TokenEvent
from thermocline.pipeline.generation import Generation
from thermocline.pipeline.mailbox import Mailbox
from thermocline.sampling.params import SamplingParams
from thermocline.text.chat_prompt import encode_chat
from thermocline.traces.chrome import write_chrome
from thermocline.traces.clock import MonotonicClock
from thermocline.traces.events import ExpertUse

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.assembly import EngineParts
    from thermocline.experts.placement import Placement
    from thermocline.messages import MachineLimits
    from thermocline.models.spec import ModelSpec
    from thermocline.pipeline.channel import ChannelStatistics
    from thermocline.pipeline.loop import StepLoop
    from thermocline.pipeline.scheduler import SchedulerSnapshot
    from thermocline.prefetch.governor import PrefetchStatistics
    from thermocline.text.tokenizer import Tokenizer
    from thermocline.traces.events import Event

# More than any last-level cache holds of it, and read within a second.
_LIMIT_SAMPLE_BYTES = 1 << 30

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since the engine was opened."""

    channels: tuple[ChannelStatistics, ...]
    heat: NDArray[np.int64]
    """Times each expert was chosen, [layers, experts]."""
    placement: Placement
    prefetch: PrefetchStatistics | None

    @property
    def hot_share(self) -> float:
        """Share of expert choices that fell on hot experts, 0 to 1."""
        total = int(self.heat.sum())
        hot = sum(
            int(row[list(ids)].sum())
            for row, ids in zip(self.heat, self.placement.hot, strict=True)
        )
        return hot / total if total else 0.0


class Engine:
    """One opened model. Make it with `async with Engine.open(path) as engine`.

    Methods that are coroutines or async iterators may be used from any event loop.
    """

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig) -> None:
        self._thread = EngineThread(path, config)
        self._request_ids = itertools.count(1)
        self._limits: MachineLimits | None = None

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], config: EngineConfig | None = None
    ) -> EngineContext:
        """Return a context manager that opens the GGUF file at `path` and closes it at the end.

        Entering raises ModelError for a file that can not be used, ConfigError for a setting that
        does not fit it, NativeModuleError when the compiled core is missing.
        """
        return EngineContext(cls(path, EngineConfig() if config is None else config))

    @property
    def spec(self) -> ModelSpec:
        """The model's dimensions."""
        return self._parts.model.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._parts.tokenizer

    @property
    def placement(self) -> Placement:
        """Which experts are hot."""
        return self._parts.placement

    @property
    def max_context_tokens(self) -> int:
        """Prompt and answer of one request must fit into so many tokens."""
        return self._parts.max_context_tokens

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        on_prompt_progress: Callable[[int, int], None] | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the answer to `prompt` (text, or token ids) as events; the last one says why it ended.

        priority: the lower value is served first. cache_salt: what is computed for the prompt is shared
        only with requests of the same one, so that nobody can learn from its speed what others asked.
        on_prompt_progress(computed, total) is called as the prompt is computed. Leaving the loop or
        being cancelled ends the request within one step. Raises RequestError for a prompt or params
        that can not be served, BusyError when too many requests are accepted, EngineError when the
        engine fails.
        """
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        request, mailbox = await self._submit(
            token_ids, params or SamplingParams(), priority=priority, cache_salt=cache_salt
        )
        try:
            while True:
                event = await mailbox.get()
                match event:
                    case TokenEvent():
                        yield event
                        if event.finish_reason is not None:
                            return
                    case PromptProgress():
                        if on_prompt_progress is not None:
                            on_prompt_progress(event.num_computed, event.num_total)
                    case RequestFailed():
                        raise event.error
                    case PromptLogits():
                        raise AssertionError("only score() asks for prompt logits")
        finally:
            self._post(lambda loop: loop.abort(request))

    async def score(self, token_ids: Sequence[int]) -> AsyncGenerator[PromptLogits, None]:
        """Yield the logits after every token of `token_ids`, in order, a chunk at a time.

        The next chunk is computed when the last was taken. Raises like `generate`.
        """
        params = SamplingParams(max_tokens=0)
        request, mailbox = await self._submit(token_ids, params, wants_prompt_logits=True)
        try:
            while True:
                event = await mailbox.get()
                match event:
                    case PromptLogits():
                        yield event
                        self._post(lambda loop: loop.resume(request))
                    case RequestFailed():
                        raise event.error
                    case TokenEvent():
                        return
                    case PromptProgress():
                        continue
        finally:
            self._post(lambda loop: loop.abort(request))

    async def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Return the token ids of `text`, off the event loop. Raises RequestError for unusable text."""
        tokenizer = self.tokenizer
        return await asyncio.to_thread(tokenizer.encode, text, parse_special=parse_special)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat prompt, ready for the assistant's answer.

        messages: OpenAI-style dicts. Text of messages can not form control tokens. Raises
        ChatTemplateError when the template refuses them, RequestError when their shape is wrong.
        """
        parts = self._parts

        def encode() -> list[int]:
            return encode_chat(
                parts.tokenizer, parts.template.get(), messages, tools=tools, variables=variables
            )

        return await asyncio.to_thread(encode)

    def statistics(self) -> EngineStatistics:
        """Return the counters so far."""
        parts = self._parts
        governor = parts.governor
        return EngineStatistics(
            parts.runner.statistics(),
            parts.heat.counts(),
            parts.placement,
            None if governor is None else governor.statistics(),
        )

    async def snapshot(self) -> SchedulerSnapshot:
        """Return what is running and waiting now, and where the cache's blocks are."""
        return await self._call(lambda loop: loop.snapshot())

    @property
    def kernels_name(self) -> str:
        """What computes: instruction set and threads, or "reference"."""
        return self._parts.kernels.name

    async def measure_limits(self) -> MachineLimits | None:
        """Measure what the computing threads can read and multiply at most; some tenths of a second.

        None with the reference kernels. Meant for an idle engine: it takes the threads for itself.
        """
        parts = self._parts
        if not isinstance(parts.kernels, NativeKernels):
            return None
        layers = parts.model.expert_layers
        sample, nbytes = [], 0
        stacks = (layer.stack for layer in layers if layer is not None)
        for part in (part for stack in stacks for part in (stack.gate, stack.up, stack.down)):
            sample.append(part.raw)
            nbytes += part.raw.nbytes
            if nbytes >= _LIMIT_SAMPLE_BYTES:
                break
        self._limits = await asyncio.to_thread(parts.kernels.measure_limits, sample)
        return self._limits

    def trace_events(self) -> list[Event]:
        """Return what the recorder holds; empty unless the config enabled the trace."""
        return self._parts.recorder.events()

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as Chrome JSON (gzipped when the name ends in .gz). Raises ConfigError.

        With it go the machine, how often each expert was chosen, and what a token reads at least
        beside what the machine can read, if `measure_limits` was called.
        """
        parts = self._parts
        facts = machine_facts()
        metadata: dict[str, str | int | float] = {
            "model": self.spec.name,
            "architecture": self.spec.architecture,
            "machine": facts.cpu,
            "cores": facts.num_usable_cores,
            "thermocline": facts.versions["thermocline"],
        }
        if parts.token_bytes is not None:
            metadata["token_bytes"] = parts.token_bytes
        if self._limits is not None:
            metadata["read_bytes_per_s"] = self._limits.read_bytes_per_s
        counts = tuple(tuple(row) for row in parts.heat.counts().tolist())
        use = ExpertUse(counts, parts.placement.hot)
        write_chrome(path, self.trace_events(), metadata=metadata, expert_use=use)

    @property
    def is_running(self) -> bool:
        """Whether requests can be served: opened, not closed, and not ended by a failure of its own."""
        return self._thread.is_running

    async def check_integrity(self) -> None:
        """Assert that scheduler, cache and ring are consistent; for tests."""
        await self._call(lambda loop: loop.check_integrity())

    @property
    def _parts(self) -> EngineParts:
        return self._thread.parts

    async def _submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        wants_prompt_logits: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> tuple[RequestId, Mailbox]:
        parts = self._parts
        prompt = _checked_prompt(token_ids, parts)
        request = RequestId(next(self._request_ids))
        mailbox = Mailbox(asyncio.get_running_loop())
        generation = Generation(
            request,
            prompt,
            params,
            parts.tokenizer,
            mailbox,
            parts.recorder,
            MonotonicClock(),
            wants_prompt_logits=wants_prompt_logits,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            await self._call(lambda loop: loop.submit(generation))
        except asyncio.CancelledError:
            # The request may have been accepted by the time the cancellation arrived here.
            self._post(lambda loop: loop.abort(request))
            raise
        return request, mailbox

    async def _call(self, action: Callable[[StepLoop], R]) -> R:
        return await self._thread.call(action)

    def _post(self, action: Callable[[StepLoop], object]) -> None:
        self._thread.post(action)


class EngineContext:
    """Opens an engine on entry and closes it on exit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __aenter__(self) -> Engine:
        thread = self._engine._thread
        thread.start()
        try:
            await thread.wait_ready()
        except BaseException:
            thread.request_close()
            await thread.wait_ended()
            raise
        return self._engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._engine._thread.request_close()
        await self._engine._thread.wait_ended()


def _checked_prompt(token_ids: Sequence[int], parts: EngineParts) -> list[int]:
    vocab_size = parts.tokenizer.vocab_size
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) > parts.max_context_tokens:
        # First, so that a prompt of millions of ids costs the caller's loop nothing.
        raise PromptTooLongError(len(token_ids), parts.max_context_tokens)
    checked = []
    for token_id in token_ids:
        try:
            # Integers of any kind, NumPy's included; True is a slip, not token 1.
            checked.append(operator.index(token_id))
            is_integer = not isinstance(token_id, bool)
        except TypeError:
            is_integer = False
        if not is_integer:
            raise RequestError(
                f"a prompt token is {token_id!r}: give integers from 0 to {vocab_size - 1}",
                param="prompt",
            )
        if not 0 <= checked[-1] < vocab_size:
            raise RequestError(
                f"prompt token {token_id} is outside of the vocabulary: give 0 to {vocab_size - 1}",
                param="prompt",
            )
    return checked
