"""Generation jobs: one or several answers to each of a request's prompts, and the steps of generating them.

Owns how the choices of one job run side by side. Knows no interface and no socket.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from thermocline.engine.scoring import token_logprobs
from thermocline.errors import EngineError, RequestError
from thermocline.messages import (
    FinishReason,
    PromptEmbedding,
    PromptLogits,
    PromptProgress,
    RequestOptions,
    TokenEvent,
)
from thermocline.server.core.steps import AnswerStep, ChoiceEnd, EndReason, PromptStep
from thermocline.text.answer_parser import AnswerShape
from thermocline.text.pieces import ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from thermocline.engine.api import Engine
    from thermocline.experts.figures import ExpertFigures
    from thermocline.sampling.params import SamplingParams
    from thermocline.server.core.steps import GenerationStep
    from thermocline.text.pieces import AnswerParser
    from thermocline.workers.offload import StillWanted

R = TypeVar("R")

MAX_CHOICES_PER_PROMPT: Final = 16
"""The largest n of a request."""

MAX_ANSWER_BYTES: Final = 64 << 20
"""Of an answer that is not streamed."""
_BYTES_PER_LOGPROB: Final = 32

# Further choices wait here instead of in the engine's queue, so that other requests find room in it.
_MAX_CONCURRENT_CHOICES: Final = 16
_SEEDS: Final = 1 << 64
# Of a prompt, in one step: encoding them takes some milliseconds.
_SCORED_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """n answers to each prompt (token ids). Choices are numbered prompt by prompt.

    make_parser: called once for each answer. Answer i to a prompt draws with params.seed + i.
    prompt_logprobs: k = log-probabilities of the prompt's tokens and of the k likeliest at each place; None = none.
    """

    prompts: tuple[Sequence[int], ...]
    params: SamplingParams
    n: int = 1
    make_parser: Callable[[], AnswerParser] = AnswerShape().parser
    options: RequestOptions = RequestOptions()  # noqa: RUF009 - frozen
    prompt_logprobs: int | None = None

    @property
    def num_choices(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.n


def check_size(job: GenerationJob) -> None:
    """Raise RequestError for a job whose prompts have more log-probabilities than an answer may hold."""
    if job.prompt_logprobs is None:
        return
    num_tokens = job.n * sum(map(len, job.prompts))
    num_bytes = num_tokens * (1 + job.prompt_logprobs) * _BYTES_PER_LOGPROB
    if num_bytes > MAX_ANSWER_BYTES:
        raise RequestError(
            f"the answer would hold {job.prompt_logprobs} log-probabilities of {num_tokens} tokens of prompts: send "
            "fewer prompts at a time, or ask for fewer",
            param="logprobs",
        )


def run_job(
    engine: Engine, job: GenerationJob, elapsed_s: Callable[[], float]
) -> AsyncGenerator[GenerationStep, None]:
    """Yield the steps of every choice as they come; each choice has one step with an end.

    elapsed_s: returns the time since the request's header was read. Closing the generator ends all choices within
    one step of the engine: use `contextlib.aclosing`. Raises what `Engine.generate` raises as soon as one choice fails.
    """
    if job.num_choices == 1:
        return _run_choice(engine, job, 0, elapsed_s)
    return _run_choices(engine, job, elapsed_s)


async def _run_choices(
    engine: Engine, job: GenerationJob, elapsed_s: Callable[[], float]
) -> AsyncGenerator[GenerationStep, None]:
    # Bounded: choices wait here for a slow reader, and the engine's mailboxes merge their events.
    arrived: asyncio.Queue[GenerationStep | Exception] = asyncio.Queue(maxsize=job.num_choices)
    tasks = _start_choices(engine, job, elapsed_s, arrived)
    try:
        num_open = job.num_choices
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_open -= isinstance(item, AnswerStep) and item.end is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _start_choices(
    engine: Engine,
    job: GenerationJob,
    elapsed_s: Callable[[], float],
    arrived: asyncio.Queue[GenerationStep | Exception],
) -> list[asyncio.Task[None]]:
    places = asyncio.Semaphore(_MAX_CONCURRENT_CHOICES)
    # The other choices of a prompt start after its first one has begun, and find the prompt in the prefix cache.
    has_begun = [asyncio.Event() for _ in job.prompts]

    async def run(choice: int) -> None:
        prompt, number = divmod(choice, job.n)
        if number:
            await has_begun[prompt].wait()
        try:
            async with places, aclosing(_run_choice(engine, job, choice, elapsed_s)) as steps:
                async for step in steps:
                    if not number and isinstance(step, AnswerStep):
                        has_begun[prompt].set()
                    await arrived.put(step)
        except Exception as error:  # noqa: BLE001 - raised by the reader of `arrived`
            await arrived.put(error)

    return [
        asyncio.create_task(run(choice), name=f"choice {choice}")
        for choice in range(job.num_choices)
    ]


async def _run_choice(
    engine: Engine, job: GenerationJob, choice: int, elapsed_s: Callable[[], float]
) -> AsyncGenerator[GenerationStep, None]:
    prompt, number = divmod(choice, job.n)
    token_ids = job.prompts[prompt]
    options = replace(job.options, wants_prompt_logits=job.prompt_logprobs is not None)
    state = _ChoiceState(choice, job.make_parser(), engine.expert_figures, elapsed_s)
    events = engine.events(token_ids, _with_seed(job.params, number), options)
    async with aclosing(events):
        async for event in events:
            match event:
                case TokenEvent():
                    yield state.step(event)
                case PromptProgress():
                    yield PromptStep(
                        choice,
                        event.num_computed,
                        event.num_total,
                        event.num_cached,
                        event.elapsed_s,
                    )
                case PromptLogits():
                    async for scored in _scored(engine, job, choice, event):
                        yield scored
                case PromptEmbedding():
                    raise AssertionError("no answer asks for an embedding")


async def _scored(
    engine: Engine, job: GenerationJob, choice: int, part: PromptLogits
) -> AsyncGenerator[PromptStep, None]:
    """Yield the log-probabilities of a chunk of the prompt, some tokens at a time: each has up to 21 of them."""
    token_ids = job.prompts[choice // job.n]
    end = part.start + len(part.logits)
    for start in range(part.start, end, _SCORED_TOKENS):
        first = start + 1
        last = min(start + _SCORED_TOKENS, end)
        # The logits after the last token are of what follows the prompt.
        wanted = token_ids[first : last + 1]
        rows = part.logits[start - part.start :][: len(wanted)]
        work = partial(token_logprobs, rows, wanted, job.prompt_logprobs or 0)
        scored = await engine.offload.run(_without_check(work), is_bulk=True)
        yield PromptStep(
            choice,
            last,
            len(token_ids),
            first=first,
            logprobs=tuple(chosen for chosen, _ in scored),
            top_logprobs=tuple(top for _, top in scored),
        )


def _without_check(work: Callable[[], R]) -> Callable[[StillWanted], R]:
    """Return work that is too short to be ended."""
    return lambda _: work()


class _ChoiceState:
    """Turns the engine's events of one choice into steps."""

    def __init__(
        self,
        choice: int,
        parser: AnswerParser,
        figures: Callable[[], ExpertFigures],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._choice = choice
        self._parser = parser
        self._figures = figures
        self._figures_before = figures()
        self._elapsed_s = elapsed_s
        self._ttft_s: float | None = None
        self._num_reasoning = 0
        self._has_tool_calls = False

    def step(self, event: TokenEvent) -> AnswerStep:
        """Return the step of one event. Raises EngineError for an answer that ended early."""
        ttft_s = self._ttft_s = self._elapsed_s() if self._ttft_s is None else self._ttft_s
        was_reasoning = self._parser.is_reasoning
        pieces = self._parser.push(event.text) if event.text else ()
        if was_reasoning or self._parser.is_reasoning:
            self._num_reasoning += len(event.token_ids)
        if event.finish_reason is not None:
            pieces += self._parser.flush()
        self._has_tool_calls |= any(isinstance(piece, ToolCallBegin) for piece in pieces)
        return AnswerStep(
            self._choice,
            event.token_ids,
            event.logprobs,
            event.top_logprobs,
            pieces,
            event.timings,
            None if event.finish_reason is None else self._end(event, ttft_s),
            ttft_s,
        )

    def _end(self, event: TokenEvent, ttft_s: float) -> ChoiceEnd:
        if event.timings is None:
            raise RuntimeError("the last event of a request came without timings")
        match event.finish_reason:
            case FinishReason.STOP:
                reason = EndReason.TOOL_CALLS if self._has_tool_calls else EndReason.STOP
            case FinishReason.LENGTH:
                reason = EndReason.LENGTH
            case other:
                raise EngineError(f"the answer ended early ({other}): send the request again")
        return ChoiceEnd(
            reason,
            event.stop,
            event.timings,
            self._num_reasoning,
            self._figures() - self._figures_before,
            event.routing,
            event.request,
            ttft_s,
            self._elapsed_s(),
        )


def _with_seed(params: SamplingParams, number: int) -> SamplingParams:
    if params.seed is None or not number:
        return params
    # Seeds are int64 and wrap around.
    seed = (params.seed + number + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return replace(params, seed=seed)
