"""The async Python API: opens a model, runs it on a thread of its own, streams answers.

A page fault or a long kernel stalls only the engine's own thread, never the caller's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from thermocline.config import EngineConfig, PlacementConfig
from thermocline.engine.chat import chat_events
from thermocline.engine.choices import read_choices
from thermocline.engine.context import EngineContext
from thermocline.engine.cpu import measure_limits
from thermocline.engine.embedding import embed_all
from thermocline.engine.request_events import request_events
from thermocline.engine.reranking import rank_all
from thermocline.engine.slots import EngineSlots
from thermocline.engine.statistics import (
    EngineStatistics,
    make_trace,
    read_busy_ns,
    read_expert_figures,
    read_statistics,
)
from thermocline.engine.thread import EngineThread
from thermocline.errors import RequestError
from thermocline.messages import PromptLogits, PromptProgress, RequestId, RequestOptions, TokenEvent
from thermocline.sampling.params import SamplingParams, with_fields
from thermocline.settings import with_settings
from thermocline.speculation.contract import drafter_names
from thermocline.text.chat_prompt import encode_chat
from thermocline.traces.chrome import write_chrome
from thermocline.workers.offload import is_bulk

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from thermocline.engine.assembly import EngineParts
    from thermocline.engine.choices import Choice
    from thermocline.engine.embedding import Embeddings
    from thermocline.engine.reranking import Ranking
    from thermocline.errors import EngineError
    from thermocline.experts.figures import ExpertFigures
    from thermocline.experts.placement.placement import Placement
    from thermocline.kernels.machine_limits import MachineLimits
    from thermocline.messages import PromptEvent
    from thermocline.models.footprint import Footprint
    from thermocline.models.spec import ModelSpec
    from thermocline.pipeline.scheduling.scheduler import SchedulerSnapshot
    from thermocline.text.tokenizer import Tokenizer
    from thermocline.text.tool_calls.tool_formats import TemplateFacts
    from thermocline.traces.events import Event, Trace
    from thermocline.traces.lanes import Track
    from thermocline.workers.offload import Offload, StillWanted


class Engine:
    """One opened model. Make it with `async with Engine.open(path) as engine`.

    Methods that are coroutines or async iterators may be used from any event loop.
    """

    def __init__(self, thread: EngineThread, config: EngineConfig) -> None:
        self.config = config
        self._thread = thread
        self._request_ids = itertools.count(1)
        self._limits: MachineLimits | None = None
        self.slots = EngineSlots(thread)
        """Saves and restores prompt caches; with `SchedulerConfig.keeps_slots` alone."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        **settings: object,
    ) -> EngineContext:
        """Return a context manager that opens the GGUF file at `path` and closes it at the end.

        settings: changes of `config` by the names of the flags, such as `hot_device="cpu"`, `ctx=8192` or
        `device_memory="12GiB"`, or whole sections, such as `memory=MemoryConfig(...)`. Raises ConfigError for a setting
        that there is not. Entering raises ModelError for a file that can not be used, ConfigError for a setting that
        does not fit it, NativeModuleError when the compiled core is missing.

        Examples:
            >>> import asyncio
            >>> from thermocline import Engine
            >>> from thermocline.demo import DEMO_MODEL_PATH
            >>> async def main():
            ...     async with Engine.open(DEMO_MODEL_PATH, ctx=512, hot_device="none") as engine:
            ...         events = engine.chat("What is an expert?", max_tokens=9)
            ...         print("".join([event.text async for event in events]))
            ...         events = engine.generate("A lane", max_tokens=3)
            ...         print([len(event.token_ids) async for event in events])
            >>> asyncio.run(main())
            An expert is a small feed-forward
            [1, 1, 1]
        """
        config = with_settings(config or EngineConfig(), settings)
        thread = EngineThread(path, config)
        return EngineContext(cls(thread, config), thread)

    def __repr__(self) -> str:
        if not self.is_running:
            return f"Engine({self._thread})"
        spec = self.spec
        return f"Engine({spec.name!r}, {spec.architecture}, context {self.max_context_tokens})"

    @property
    def spec(self) -> ModelSpec:
        """The model's dimensions."""
        return self._parts.model.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._parts.text.tokenizer

    @property
    def offload(self) -> Offload:
        """Threads for work that is too long for an event loop."""
        return self._parts.text.offload

    @property
    def template_facts(self) -> TemplateFacts:
        """What the model's chat template tells of its answers."""
        return self._parts.text.template.facts

    def require_template(self) -> None:
        """Raise ConfigError if the model has no chat template, so that `encode_chat` needs one given."""
        self._parts.text.template.require()

    @property
    def template_source(self) -> str:
        """The text of the model's chat template, empty for none."""
        return self._parts.text.template.source

    @property
    def max_requests(self) -> int:
        """Requests that are accepted at a time, running and waiting."""
        return self.config.scheduler.max_requests

    @property
    def placement(self) -> Placement:
        """Which experts are hot now."""
        return self._parts.experts.placement

    @property
    def placement_config(self) -> PlacementConfig:
        """What was asked for, with the device that was chosen in place of each "auto"."""
        return self._parts.experts.devices.placement

    @property
    def footprint(self) -> Footprint:
        """What the model's bytes are for."""
        return self._parts.footprint

    @property
    def max_context_tokens(self) -> int:
        """Prompt and answer of one request must fit into so many tokens."""
        return self._parts.limits.max_context_tokens

    @property
    def chunk_tokens(self) -> int:
        """The most tokens of a prompt that walk through the layers together."""
        return self._parts.limits.chunk_tokens

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        speculate: str | None = None,
        on_prompt_progress: Callable[[int, int], None] | None = None,
        **sampling: object,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the answer to `prompt` (text, or token ids) as events; the last one says why it ended.

        sampling: changes of `params` by the names of its fields, such as `max_tokens=8`. priority: the lower value is
        served first. cache_salt: what is computed for the prompt is shared only with requests of the same one, so that
        nobody can learn from its speed what others asked.
        speculate: who may draft its tokens, as --speculate says it; None for what the engine was told.
        on_prompt_progress(computed, total) is called as the prompt is computed. Leaving the loop or
        being cancelled ends the request within one step. Raises RequestError for a prompt or params
        that can not be served, BusyError when too many requests are accepted, EngineError when the
        engine fails.
        """
        params = with_fields(params, sampling)
        token_ids = (
            await self.encode(prompt, max_tokens=self.max_context_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        try:
            drafters = None if speculate is None else drafter_names(speculate)
        except ValueError as error:
            raise RequestError(f"speculate: {error}", param="speculate") from error
        options = RequestOptions(priority=priority, cache_salt=cache_salt, speculate=drafters)
        events = self.events(token_ids, params, options)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TokenEvent):
                    yield event
                elif isinstance(event, PromptProgress) and on_prompt_progress is not None:
                    on_prompt_progress(event.num_computed, event.num_total)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        variables: Mapping[str, object] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        speculate: str | None = None,
        on_prompt_progress: Callable[[int, int], None] | None = None,
        **sampling: object,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the answer to `messages` (OpenAI-style dicts, or a text that the user says) as events.

        Events are as of `generate`, but for the model's reasoning, which is in `TokenEvent.reasoning` and not in `text`.
        variables: for the chat template, such as {"enable_thinking": False}. Raises what `encode_chat` and `generate`
        raise. For tools, encode with `encode_chat`, or use the server.
        """
        generate = partial(
            self.generate,
            priority=priority,
            cache_salt=cache_salt,
            speculate=speculate,
            on_prompt_progress=on_prompt_progress,
        )
        return chat_events(self, messages, with_fields(params, sampling), variables, generate)

    def events(
        self, token_ids: Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[TokenEvent | PromptEvent, None]:
        """Yield all that happens to one request, in order. Raises like `generate`."""
        if self.spec.num_scores and options.pooling is None:
            raise RequestError(
                "this model scores how well documents answer a query, and writes no text: use /v1/rerank",
                param="model",
            )
        request = RequestId(next(self._request_ids))
        return request_events(self._thread, request, token_ids, params, options)

    async def score(self, token_ids: Sequence[int]) -> AsyncGenerator[PromptLogits, None]:
        """Yield the logits after every token of `token_ids`, in order, a chunk at a time.

        The next chunk is computed when the last was taken. Raises like `generate`.
        """
        options = RequestOptions(wants_prompt_logits=True)
        events = self.events(token_ids, SamplingParams(max_tokens=0), options)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, PromptLogits):
                    yield event

    async def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        truncate: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Embeddings:
        """Return an embedding of each text, which may be token ids; a single string is one text.

        It is made as the model file says (`ModelSpec.pooling`): of the last token's state where it says nothing. BOS and
        EOS go around a text as the file says. normalize: vectors get length 1. truncate: of texts that are longer than
        the context, the beginning is embedded. priority, cache_salt: as for `generate`. Raises RequestError for what can
        not be embedded, PromptTooLongError for a text too long, and otherwise what `generate` raises.
        """
        return await embed_all(
            self,
            [texts] if isinstance(texts, str) else texts,
            normalize=normalize,
            truncate=truncate,
            options=RequestOptions(priority=priority, cache_salt=cache_salt),
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Ranking:
        """Return how well each document answers the query, by a model that scores pairs (Qwen3-Reranker).

        priority, cache_salt: as for `generate`. Raises RequestError for a model that is no reranker, PromptTooLongError
        for a pair that is longer than the context, and otherwise what `generate` raises.
        """
        parts, options = self._parts, RequestOptions(priority=priority, cache_salt=cache_salt)
        head = parts.model.score_head
        return await rank_all(self, parts.text.rerank_prompt, head, query, documents, options)

    async def encode(
        self,
        text: str,
        *,
        parse_special: bool = True,
        add_bos: bool | None = None,
        max_tokens: int | None = None,
        truncate: bool = False,
    ) -> list[int]:
        """Return the token ids of `text`, off the event loop. Raises RequestError for unusable text.

        parse_special, add_bos, max_tokens, truncate: as in `Tokenizer.encode`.
        """
        encode = partial(
            self.tokenizer.encode,
            text,
            parse_special=parse_special,
            add_bos=add_bos,
            max_tokens=max_tokens,
            truncate=truncate,
        )
        return await self.offload.run(
            lambda still_wanted: encode(on_slice=still_wanted), is_bulk=is_bulk(text)
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
    ) -> list[int]:
        """Return the token ids of a chat prompt, ready for the assistant's answer.

        messages: OpenAI-style dicts. Text of messages can not form control tokens. continue_final: the
        last message is the beginning of the answer. template: the text of another template than the
        model's. Raises ChatTemplateError when the template refuses them, RequestError when their shape
        is wrong, PromptTooLongError when the context can not hold them, and `why_ended` when the engine
        is not running.
        """
        text = self._parts.text
        if not self.is_running:
            raise self.why_ended()
        is_long = is_bulk(messages, tools, variables)

        def encode(still_wanted: StillWanted) -> list[int]:
            with text.template.borrow(template, for_bulk=is_long) as borrowed:
                return encode_chat(
                    text.tokenizer,
                    borrowed,
                    messages,
                    tools=tools,
                    variables=variables,
                    add_generation_prompt=add_generation_prompt,
                    continue_final=continue_final,
                    text_header=text.template.facts_of(template).text_header,
                    max_tokens=self.max_context_tokens,
                    on_slice=still_wanted,
                )

        return await self.offload.run(encode, is_bulk=is_long)

    async def prepare_constraints(self) -> None:
        """Make now what the first constrained answer would make: the vocabulary's table.

        With 150,000 tokens that holds the interpreter for a second, which a server should not do while
        it answers others. A model without end tokens has none.
        """
        await asyncio.wrap_future(self._parts.text.grammars.prepare())

    def statistics(self) -> EngineStatistics:
        """Return the counters so far."""
        return read_statistics(self._parts)

    def choices(self) -> tuple[Choice, ...]:
        """Return what the engine chose or was told, each with its reason, as it is now."""
        return read_choices(self._parts, self.config)

    def expert_figures(self) -> ExpertFigures:
        """Return what became of chosen experts so far; tens of microseconds."""
        return read_expert_figures(self._parts)

    async def snapshot(self) -> SchedulerSnapshot:
        """Return what is running and waiting now, and where the cache's blocks are."""
        return await self._thread.call(lambda loop: loop.snapshot())

    @property
    def kernels_name(self) -> str:
        """What computes: instruction set and threads, or "reference"."""
        return self._parts.kernels.name

    async def measure_limits(self) -> MachineLimits | None:
        """Measure what the computing threads can read and multiply at most; some tenths of a second.

        None with the reference kernels. Meant for an idle engine: it takes the threads for itself.
        """
        parts = self._parts
        self._limits = await asyncio.to_thread(
            measure_limits, parts.kernels, parts.model.non_expert.layers
        )
        return self._limits

    def trace_events(self) -> list[Event]:
        """Return what the recorder holds; empty unless the config enabled the trace, or it was started."""
        return self._parts.recorder.events()

    @property
    def is_tracing(self) -> bool:
        """Whether the timeline is being recorded."""
        return self._parts.recorder.enabled

    def start_trace(self) -> None:
        """Record the timeline from now on; what was recorded before is forgotten."""
        self._parts.recorder.start()

    def stop_trace(self) -> tuple[Trace, int]:
        """Record no more; return what was recorded, and how many older events had no room.

        Takes some microseconds per event: call it off the event loop.
        """
        events, num_dropped = self._parts.recorder.stop()
        return self._trace(events), num_dropped

    def busy_ns(self) -> dict[Track, int]:
        """Return how long each lane has worked since the engine was opened, in nanoseconds.

        Of two readings, the difference over the time between them is the busy share. Costs next to nothing.
        """
        return read_busy_ns(self._parts)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as Chrome JSON (gzipped when the name ends in .gz). Raises ConfigError.

        With it go the machine, how often each expert was chosen, and what a token reads at least
        beside what the machine can read, if `measure_limits` was called.
        """
        trace = self._trace(self.trace_events())
        write_chrome(path, trace.events, metadata=trace.metadata, expert_use=trace.expert_use)

    def _trace(self, events: Sequence[Event]) -> Trace:
        limits = self._limits
        return make_trace(self._parts, events, None if limits is None else limits.read_bytes_per_s)

    @property
    def is_running(self) -> bool:
        """Whether requests can be served: opened, not closed, and not ended by a failure of its own."""
        return self._thread.is_running

    def why_ended(self) -> EngineError:
        """Return why an engine that is not running serves nothing: closed, a device that does not work any more, or a
        model whose file was changed.
        """
        return self._thread.why_ended()

    async def wait_ended(self) -> None:
        """Wait until the engine has ended: closed, or by a failure; see `why_ended`."""
        await self._thread.wait_over()

    async def check_model(self) -> None:
        """Look now whether the model's files were changed, which a running engine does at each step.

        If so, the engine ends. Raises `why_ended` of an engine that is not running.
        """
        await self._thread.call(lambda loop: loop.check_model())

    async def check_integrity(self) -> None:
        """Assert that scheduler, cache and ring are consistent; for tests."""
        await self._thread.call(lambda loop: loop.check_integrity())
        hot_device = self._parts.experts.hot_device
        if hot_device is not None:
            hot_device.store.check_integrity()

    @property
    def _parts(self) -> EngineParts:
        return self._thread.parts
