"""`thermocline chat`: a conversation in the terminal, or over a pipe with one turn per line.

Owns the conversation: what is said again to the model each turn, and what is dropped when the context
is full.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import AnswerWriter, hint, note
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import (
    engine_options,
    model_argument,
    quiet_option,
    sampling_options,
    trace_option,
    verbose_option,
)
from thermocline.cli.prompt import system_option, with_system
from thermocline.cli.session import (
    CollectedAnswer,
    hint_speed,
    model_path,
    open_engine,
    stream_answer,
    trace_file,
)
from thermocline.cli.spoken import spoken
from thermocline.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    import asyncio

    from thermocline.cli.spoken import Spoken
    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.sampling.params import SamplingParams

_PROMPT = "> "
_HELP = """\
/help   this list
/reset  forget the conversation
/exit   leave (so does Ctrl-D; Ctrl-C stops an answer, and leaves at the prompt)"""


@click.command()
@model_argument()
@hub_model()
@system_option
@sampling_options
@trace_option
@quiet_option
@verbose_option
@engine_options()
def chat(
    model: str | None,
    system: str | None,
    params: SamplingParams,
    config: EngineConfig,
    trace: str | None,
    is_verbose: bool,
) -> None:
    """Talk with a model; it remembers the conversation.

    \b
    Examples:
      thermocline chat
      thermocline chat model.gguf --system "Answer in one sentence." --temperature 0.7
      printf 'Hello\\nWhat did I say?\\n' | thermocline chat model.gguf

    Type /help for the commands. Ctrl-C stops an answer; at the prompt it leaves. When the context is
    full, the oldest turns are dropped, and the chat says so.
    """
    import asyncio

    # One run of the loop per turn: between turns this thread waits for the keyboard, with Python's own
    # handling of Ctrl-C; within a turn, Ctrl-C cancels that turn alone.
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def enter() -> Engine:
            path, timeline = model_path(model), trace_file(trace)
            context = open_engine(path, config, timeline, explains=is_verbose)
            engine = await stack.enter_async_context(context)
            engine.require_template()
            return engine

        try:
            _converse(runner, ChatSession(runner.run(enter()), params, system))
        finally:
            runner.run(stack.aclose())


@dataclass(slots=True)
class ChatSession:
    """The turns so far, and how to take the next one."""

    engine: Engine
    params: SamplingParams
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages.clear()

    async def take_turn(self, text: str) -> None:
        """Answer `text`, streaming to stdout. A turn that fails is forgotten; a stopped one is kept.

        Raises RequestError for a message that can not be answered at all.
        """
        import asyncio

        messages = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = await self._fitting_prompt(messages)
        answer, reader = CollectedAnswer(), spoken(self.engine, prompt_ids)
        try:
            with AnswerWriter() as writer:
                await stream_answer(
                    self.engine, prompt_ids, self.params, writer.write, answer, reader=reader
                )
        except asyncio.CancelledError:
            self._keep(messages, answer, reader)
            raise
        self._keep(messages, answer, reader)
        num_tokens = len(prompt_ids) + len(answer.token_ids)
        if answer.finish_reason == "length" and num_tokens >= self.engine.max_context_tokens:
            note("[the context is full: the answer was cut; the next turn drops the oldest turns]")
        hint_speed(answer.timings)

    def _keep(
        self, messages: list[dict[str, str]], answer: CollectedAnswer, reader: Spoken | None
    ) -> None:
        said = {"role": "assistant", "content": answer.text}
        self.messages = [*messages, said if reader is None else reader.message()]

    async def _fitting_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the prompt with room for an answer; drops the oldest turns where there is none."""
        limit = self.engine.max_context_tokens
        most = limit - _room_for_answer(self.params.max_tokens, limit)
        ids = await self._encode(messages)
        num_dropped = 0
        while len(ids) > most and len(messages) > 1:
            del messages[:2]
            num_dropped += 1
            ids = await self._encode(messages)
        if len(ids) >= limit:
            raise PromptTooLongError(len(ids), limit)
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            note(f"[the context is full: the oldest {turns} dropped]")
        return ids

    async def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        return await self.engine.encode_chat(with_system(self.system, messages))


def _room_for_answer(max_tokens: int | None, max_context_tokens: int) -> int:
    """Return how many tokens to keep free: what was asked for, but at most half of the context."""
    wanted = max_context_tokens // 4 if max_tokens is None else max_tokens
    return max(1, min(wanted, max_context_tokens // 2))


def _converse(runner: asyncio.Runner, conversation: ChatSession) -> None:
    _enable_line_editing()
    hint(f"{conversation.engine.spec.name}: type a message, or /help")
    while (line := _read_line()) is not None:
        text = line.strip()
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                click.echo(_HELP, err=True)
            case "/reset":
                conversation.reset()
                note("[the conversation starts anew]")
            case _ if text.startswith("/") and " " not in text:
                note(f"[there is no command {text}; /help lists them]")
            case _:
                _take_turn(runner, conversation, text)


def _take_turn(runner: asyncio.Runner, conversation: ChatSession, text: str) -> None:
    try:
        runner.run(conversation.take_turn(text))
    except RequestError as error:
        if not sys.stdin.isatty():
            raise
        note(f"error: {error}")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        note("[stopped]")


def _read_line() -> str | None:
    """Return the next line, None at the end; prompts only a person."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    try:
        if sys.stdout.isatty():
            return input(_PROMPT)
        click.echo(_PROMPT, nl=False, err=True)
        return input()
    except EOFError:
        click.echo(err=True)
        return None


def _enable_line_editing() -> None:
    """Give `input` cursor keys and history, where Python was built with them."""
    if not sys.stdin.isatty():
        return
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
