"""The Python API for scripts and notebooks: prompts in, answers out, without a line of asyncio.

Owns the order of the answers, and how many requests are under way. Knows neither scheduler nor file.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast, overload

from thermocline.engine.api import Engine
from thermocline.engine.loop_thread import LoopThread
from thermocline.errors import EngineClosedError, EngineError, RequestError
from thermocline.sampling.params import SamplingParams, with_fields

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

    from thermocline.config import EngineConfig
    from thermocline.engine.context import EngineContext
    from thermocline.engine.embedding import Embeddings
    from thermocline.engine.loop_thread import LoopJob
    from thermocline.messages import FinishReason, Timings, TokenEvent, TokenLogprob

    Prompt = str | Sequence[int]
    Conversation = str | Sequence[Mapping[str, Any]]
    Stream = AsyncGenerator[TokenEvent, None]

Item = TypeVar("Item")

# Answers that are ready, but wait for an earlier one, and prompts that are taken ahead.
_MAX_AHEAD: Final = 256
_SHOWN_CHARS: Final = 60


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """A whole answer. `str()` of it is its text.

    text: what was said, without reasoning where `chat` could tell it apart. token_ids: of the whole answer, an end
    token included. finish_reason: "stop" or "length". logprobs, top_logprobs: one entry per token if asked for.

    Examples:
        >>> answer = llm.chat("What is an expert?", max_tokens=8)
        >>> str(answer.finish_reason), len(answer.token_ids)
        ('length', 8)
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text
        shown = repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}...")
        return f"Answer({shown}, {len(self.token_ids)} tokens, {self.finish_reason})"


class LLM:
    """A model for scripts: it blocks until answers are there. Close it, or use it in a `with` statement.

    Any thread may call it, also one with a running event loop (a Jupyter cell): it has a loop of its own. As many
    requests as the engine takes are under way at a time, and further ones wait, so that nothing is refused.

    Examples:
        >>> from thermocline import LLM
        >>> from thermocline.demo import DEMO_MODEL_PATH
        >>> with LLM(DEMO_MODEL_PATH, ctx=512) as llm:
        ...     answers = llm.generate(["An expert is", "A lane is"], max_tokens=4)
        >>> [len(answer.token_ids) for answer in answers]
        [4, 4]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        **settings: object,
    ) -> None:
        """Open the GGUF file at `path`. settings: as for `Engine.open`. Raises what opening an engine raises."""
        self._path = Path(path)
        context = Engine.open(path, config, **settings)
        self._loop = LoopThread("thermocline llm")
        try:
            self._engine = self._loop.run(context.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        limits = self._engine.config.scheduler
        # Below both limits of the engine, so that it never says that it is busy.
        self._places = asyncio.Semaphore(min(limits.max_requests, limits.max_queue))
        self._finalizer = weakref.finalize(self, _close_somehow, self._loop, context)

    def __repr__(self) -> str:
        return f"LLM({self._path.name!r}, {self._engine!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the model. Running calls of other threads end with EngineClosedError; more calls do nothing."""
        if (parts := self._finalizer.detach()) is not None:
            _close(*parts[2])

    @property
    def engine(self) -> Engine:
        """The engine behind it, for its tokenizer, its statistics and its plan."""
        return self._engine

    @overload
    def generate(  # type: ignore[overload-overlap] # a text, which is an iterable of texts, is one
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **sampling: object,
    ) -> Answer: ...
    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **sampling: object,
    ) -> list[Answer]: ...
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **sampling: object,
    ) -> Answer | list[Answer]:
        """Return the continuation of each prompt, in order; of a single prompt, its own.

        prompts: texts, or token ids. params, sampling: as for `Engine.generate`. progress: show a bar on stderr. Raises
        what `Engine.generate` raises, with the number of the prompt in a note; the others are given up then.

        Examples:
            >>> [len(answer.token_ids) for answer in llm.generate(["An expert", "A lane"], max_tokens=3)]
            [3, 3]
            >>> llm.generate("What is", max_tokens=3).finish_reason
            <FinishReason.LENGTH: 'length'>
        """
        is_one = _is_prompt(prompts)
        several = cast("Iterable[Prompt]", [prompts] if is_one else prompts)
        answers = list(self.generate_each(several, params, progress=progress, **sampling))
        return answers[0] if is_one else answers

    def generate_each(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **sampling: object,
    ) -> Iterator[Answer]:
        """Yield the continuation of each prompt, in order, as soon as it is there; see `generate`.

        Prompts are taken from the iterable as places get free, at most 256 ahead: neither all prompts nor all answers
        need to be in memory. Leaving the loop ends what is under way.

        Examples:
            >>> prompts = (f"Expert {number} is" for number in range(3))
            >>> [len(answer.token_ids) for answer in llm.generate_each(prompts, max_tokens=2)]
            [2, 2, 2]
        """
        fixed = with_fields(params, sampling)
        return self._each(prompts, lambda prompt: self._engine.generate(prompt, fixed), progress)

    @overload
    def chat(  # type: ignore[overload-overlap] # a text, which is an iterable of texts, is one
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        variables: Mapping[str, object] | None = None,
        **sampling: object,
    ) -> Answer: ...
    @overload
    def chat(
        self,
        messages: Iterable[Conversation],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        variables: Mapping[str, object] | None = None,
        **sampling: object,
    ) -> list[Answer]: ...
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        variables: Mapping[str, object] | None = None,
        **sampling: object,
    ) -> Answer | list[Answer]:
        """Return the answer to a conversation, or in order to each of several.

        messages: a text that a user says, messages as OpenAI's clients send them, or an iterable of such. variables: for
        the chat template, such as {"enable_thinking": False}. Otherwise as `generate`; raises what `Engine.chat` raises.

        Examples:
            >>> print(llm.chat([{"role": "user", "content": "What is an expert?"}], max_tokens=9))
            An expert is a small feed-forward
        """
        fixed = with_fields(params, sampling)

        def stream(conversation: Conversation) -> Stream:
            return self._engine.chat(conversation, fixed, variables=variables)

        is_one = _is_conversation(messages)
        several = cast("Iterable[Conversation]", [messages] if is_one else messages)
        answers = list(self._each(several, stream, progress))
        return answers[0] if is_one else answers

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        truncate: bool = False,
    ) -> Embeddings:
        """Return an embedding of each text: `Engine.embed`, waited for."""
        self._require_open()
        return self._loop.run(self._engine.embed(texts, normalize=normalize, truncate=truncate))

    def _each(
        self, items: Iterable[Item], stream: Callable[[Item], Stream], progress: bool
    ) -> Iterator[Answer]:
        jobs: deque[LoopJob[Answer]] = deque()
        num_begun = 0
        with _progress_bar(progress, items) as advance:
            try:
                for item in items:
                    self._require_open()
                    jobs.append(self._loop.submit(self._answer(stream(item), num_begun)))
                    num_begun += 1
                    while jobs and (jobs[0].has_ended or len(jobs) >= _MAX_AHEAD):
                        yield _taken(jobs, advance)
                while jobs:
                    yield _taken(jobs, advance)
            finally:
                for job in jobs:
                    job.cancel()
                for job in jobs:
                    job.wait_ended()

    async def _answer(self, events: Stream, index: int) -> Answer:
        """Return the answer that a stream brings, once there is a place for its request."""
        async with self._places, aclosing(events):
            try:
                return await _collected(events)
            except RequestError as error:
                error.add_note(f"this is about prompt {index}, counted from 0")
                raise

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineClosedError("the model is closed: make a new LLM")


async def _collected(events: Stream) -> Answer:
    texts, reasonings, seen = [], [], []
    async for event in events:
        texts.append(event.text)
        reasonings.append(event.reasoning)
        seen.append(event)
        if event.finish_reason is not None and event.timings is not None:
            return Answer(
                "".join(texts),
                "".join(reasonings),
                tuple(token for each in seen for token in each.token_ids),
                event.finish_reason,
                event.timings,
                tuple(logprob for each in seen for logprob in each.logprobs),
                tuple(top for each in seen for top in each.top_logprobs),
            )
    raise EngineError("an answer ended without its last event: send it again")


def _taken(jobs: deque[LoopJob[Answer]], advance: Callable[[], object]) -> Answer:
    """Wait for the first job and take it off; one that is interrupted stays, to be cancelled."""
    answer = jobs[0].result()
    jobs.popleft()
    advance()
    return answer


def _is_prompt(prompts: object) -> bool:
    """Whether it is one prompt: a text, or token ids."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], Integral)


def _is_conversation(messages: object) -> bool:
    """Whether it is one conversation: a text, or messages."""
    if isinstance(messages, str):
        return True
    return isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], dict)


@contextmanager
def _progress_bar(is_wanted: bool, items: object) -> Iterator[Callable[[], object]]:
    """Show how many answers there are, on stderr; the context's value counts one more."""
    if not is_wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = len(items) if hasattr(items, "__len__") else None
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)


def _close(loop: LoopThread, context: EngineContext) -> None:
    loop.run(context.__aexit__())
    loop.close()


def _close_somehow(loop: LoopThread, context: EngineContext) -> None:
    """Close what nobody closed. The collector calls this from any thread, also from one that closing waits for."""
    if threading.current_thread() is threading.main_thread():
        _close(loop, context)
    else:
        threading.Thread(target=_close, args=(loop, context), name="thermocline close").start()
