"""`thermocline chat`: a conversation in the terminal, or over a pipe with one turn per line."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import click

from thermocline.cli.chat_commands import EXITS, find_command
from thermocline.cli.chat_input import ChatInput
from thermocline.cli.console import hint, note, renders_markdown
from thermocline.cli.conversation import ChatSession
from thermocline.cli.line_history import LineHistory
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import (
    engine_options,
    model_argument,
    quiet_option,
    sampling_options,
    trace_option,
    verbose_option,
)
from thermocline.cli.prompt import system_option, think_option
from thermocline.cli.session import model_path, open_engine, trace_file
from thermocline.cli.sources import SettingOption
from thermocline.environment import user_state_folder
from thermocline.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import asyncio

    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.sampling.params import SamplingParams


@click.command()
@model_argument()
@hub_model()
@system_option
@think_option(SettingOption)
@click.option(
    "--markdown/--no-markdown",
    cls=SettingOption,
    default=True,
    show_default=True,
    help="In a terminal, show Markdown with styles, or as the model writes it.",
)
@click.option(
    "--history/--no-history",
    cls=SettingOption,
    default=True,
    show_default=True,
    help="Keep what is typed for the next chat, in a file that nobody else can read.",
)
@sampling_options
@trace_option
@quiet_option
@verbose_option
@engine_options()
def chat(  # noqa: PLR0913 - one per flag
    model: str | None,
    system: str | None,
    thinks: bool | None,
    markdown: bool,
    history: bool,
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

    Type /help for the commands. Ctrl-C stops an answer and takes back a half-typed line; on an empty line it leaves. When
    the context is full, the oldest turns are dropped, and the chat says so.
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
            engine = runner.run(enter())
            is_styled = markdown and renders_markdown()
            session = ChatSession(engine, params, system, thinks, is_styled=is_styled)
            _ = session.variables  # raises for a switch that the template does not have
            folder = user_state_folder() if history else None
            _converse(runner, session, None if folder is None else LineHistory(folder))
        finally:
            runner.run(stack.aclose())


def _converse(runner: asyncio.Runner, session: ChatSession, history: LineHistory | None) -> None:
    keyboard = ChatInput(history)
    hint(f"{session.engine.spec.name}: type a message, or /help")
    while (message := keyboard.read()) is not None:
        text = message.strip()
        if text in EXITS:
            return
        if text:
            _take(runner, session, text)


def _take(runner: asyncio.Runner, session: ChatSession, text: str) -> None:
    """Do what was typed. At a terminal, what goes wrong is told, and the chat goes on."""
    try:
        found = find_command(text)
    except RequestError as error:
        note(f"[{error}]")
        return
    try:
        if found is None:
            runner.run(session.take_turn(text))
        elif (rest := found[0].run(session, found[1])) is not None:
            runner.run(rest)
    except (RequestError, ConfigError, OSError) as error:
        if not sys.stdin.isatty() or isinstance(error, BrokenPipeError):
            raise
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        what = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        note(f"error: {where}{what}")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        note("[stopped]")
