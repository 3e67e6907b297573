"""What a person may type in a chat that is no message: commands that begin with a slash."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from thermocline.cli.console import note, one_line
from thermocline.cli.options import sampling_settings, sampling_value
from thermocline.cli.saved_chat import load_chat, save_chat
from thermocline.errors import ConfigError, RequestError
from thermocline.wording import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from thermocline.cli.conversation import ChatSession

EXITS: Final = frozenset({"/exit", "/quit"})
_END: Final = """\
/exit   leave; so does Ctrl-D
Three quotes (\"""), or a backslash at a line's end, begin a message of several lines.
Ctrl-C stops an answer, or takes back a half-typed line; on an empty line it leaves."""
_SWITCH: Final = {"on": True, "off": False, "default": None}


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One command. run(session, argument) does it, or returns what is left to be awaited.

    It raises RequestError, ConfigError or OSError.
    """

    name: str
    argument: str
    help: str
    run: Callable[[ChatSession, str], Coroutine[Any, Any, None] | None]
    also: tuple[str, ...] = ()


def find_command(text: str) -> tuple[ChatCommand, str] | None:
    """Return the command that a message is, and its argument; None for a message to the model.

    Raises RequestError for a single word with a slash that is no command.
    """
    if not text.startswith("/") or "\n" in text:
        return None
    word, _, argument = text.partition(" ")
    for command in COMMANDS:
        if word == command.name or word in command.also:
            return command, argument.strip()
    if argument:
        return None
    raise RequestError(f"there is no command {word}; /help lists them")


def _help(session: ChatSession, argument: str) -> None:
    heads = [f"{command.name} {command.argument}".strip() for command in COMMANDS]
    width = max(map(len, heads))
    for head, command in zip(heads, COMMANDS, strict=True):
        click.echo(f"{head:<{width}}  {command.help}", err=True)
    click.echo(_END, err=True)


def _clear(session: ChatSession, argument: str) -> None:
    session.reset()
    note("[the conversation starts anew]")


def _system(session: ChatSession, argument: str) -> None:
    if argument:
        session.system = None if argument == "-" else argument
    say = "there is no system message" if session.system is None else f"system: {session.system}"
    note(f"[{say}]")


def _set(session: ChatSession, argument: str) -> None:
    name, _, text = argument.partition(" ")
    name = name.removeprefix("--").replace("-", "_")
    text = text.strip().removeprefix("= ")
    known = {setting.key: setting for setting in sampling_settings()}
    if not name:
        for key, setting in known.items():
            _tell(key, getattr(session.params, setting.name))
        _tell("think", session.thinks)
    elif name == "think":
        if text not in _SWITCH:
            raise RequestError(f"think is {text!r}: give on, off or default")
        before, session.thinks = session.thinks, _SWITCH[text]
        try:
            _ = session.variables
        except ConfigError:
            session.thinks = before
            raise
        _tell(name, session.thinks)
    elif name in known:
        field = known[name].name
        session.params = replace(session.params, **{field: sampling_value(known[name], text)})
        _tell(name, getattr(session.params, field))
    else:
        raise RequestError(unknown_name(name, (*known, "think"), "setting of an answer"))


def _tell(name: str, value: object) -> None:
    match value:
        case None:
            shown = "default"
        case bool():
            shown = "on" if value else "off"
        case tuple():
            shown = " ".join(map(repr, value)) or "none"
        case _:
            shown = str(value)
    click.echo(one_line(f"{name} = {shown}"), err=True)


def _save(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/save")
    save_chat(path, session.system, session.messages)
    note(f"[saved: {path}]")


def _load(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/load")
    session.system, session.messages = load_chat(path)
    session.timings = None
    note(f"[{len(session.messages)} messages of {path}; /retry answers the last question again]")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError(f"{command} needs the name of a file: {command} chat.json")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{argument}: {error}: type the whole path") from error


async def _retry(session: ChatSession, argument: str) -> None:
    await session.retry()


async def _tokens(session: ChatSession, argument: str) -> None:
    used, limit = await session.count_tokens(), session.engine.max_context_tokens
    note(f"[the conversation has {used} tokens, of {limit} that the context holds]")
    if (last := session.timings) is not None:
        note(
            f"[the last answer: {last.num_output_tokens} tokens at {last.decode_tokens_per_s:.1f}/s; its prompt: "
            f"{last.num_prompt_tokens} tokens, {last.num_cached_tokens} of them known from before]"
        )


COMMANDS: Final = (
    ChatCommand("/help", "", "this list", _help),
    ChatCommand(
        "/clear", "", "forget the conversation; /reset is the same", _clear, also=("/reset",)
    ),
    ChatCommand("/retry", "", "answer the last message again", _retry),
    ChatCommand("/system", "TEXT", "set the system message; - for none", _system),
    ChatCommand("/set", "NAME VALUE", "change a setting; alone it lists them", _set),
    ChatCommand("/save", "FILE", "write the conversation to a file", _save),
    ChatCommand("/load", "FILE", "go on with a saved conversation", _load),
    ChatCommand("/tokens", "", "how full the context is", _tokens),
)
