"""The forms in which a command takes its prompt: text, chat message or token ids. Knows no answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from thermocline.cli.batch_files import BatchFiles
from thermocline.cli.llama_flags import names
from thermocline.cli.options import gather, parse_token_ids
from thermocline.cli.session import read_line_text, read_text
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.engine.api import Engine

Command = TypeVar("Command", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class PromptForm:
    """Exactly one of text, chat and token_ids is given; system goes with chat."""

    text: str | None
    chat: str | None
    token_ids: str | None
    system: str | None
    thinks: bool | None = None

    def __post_init__(self) -> None:
        """Check that there is one prompt. Raises ConfigError."""
        forms = (self.text, self.chat, self.token_ids)
        if sum(form is not None for form in forms) != 1:
            raise ConfigError(
                "give exactly one of --prompt, --file, --chat, --prompt-tokens and --batch"
            )
        if self.system is not None and self.chat is None:
            raise ConfigError("--system goes with --chat only")
        if self.thinks is not None and self.chat is None:
            raise ConfigError("--think and --no-think go with --chat only")

    async def encode(self, engine: Engine) -> list[int]:
        """Return the prompt's token ids. Raises RequestError or ConfigError."""
        if self.token_ids is not None:
            return list(parse_token_ids(read_line_text(self.token_ids), "--prompt-tokens"))
        if self.chat is not None:
            messages = [{"role": "user", "content": read_line_text(self.chat)}]
            variables = thinking_variables(engine, self.thinks) or None
            return await engine.encode_chat(with_system(self.system, messages), variables=variables)
        return await engine.encode(read_line_text(self.text or ""))


def with_system(system: str | None, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the messages behind the system message, if there is one."""
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def thinking_variables(engine: Engine, thinks: bool | None) -> dict[str, object]:
    """Return the chat template's variables that switch reasoning on or off; none for None.

    Raises ConfigError for a template that has no switch.
    """
    if thinks is None:
        return {}
    from thermocline.server.core.structured import FormatFields, plan_format

    facts = engine.template_facts
    effort = FormatFields(reasoning_effort="medium" if thinks else "none")
    variables = dict(plan_format(facts, effort).template_variables)
    if not variables:
        flag = "--think" if thinks else "--no-think"
        raise ConfigError(
            f"{flag}: the chat template of {engine.spec.name} has no switch for reasoning; leave it out"
        )
    return variables


def think_option(kind: type[click.Option]) -> Callable[[Command], Command]:
    """Return the option --think, whose value may come from the settings where `kind` says so."""
    return click.option(
        "--think/--no-think",
        "thinks",
        cls=kind,
        default=None,
        help="Let the model reason before it answers, or not (default: as its chat template does).",
    )


def _form_or_files(
    batch: Path | None,
    out: Path | None,
    **form: Any,  # noqa: ANN401 - handed on
) -> PromptForm | BatchFiles:
    if batch is None and out is None:
        return _form(**form)
    if batch is None or out is None:
        raise ConfigError(
            "--batch FILE has the requests, and --out FILE gets the answers: give both"
        )
    if any(value not in (None, False) for value in form.values()):
        raise ConfigError(
            "--batch has the prompts: leave out --prompt, --file, --chat and the like"
        )
    return BatchFiles(batch, out)


def _form(
    text: str | None,
    chat: str | None,
    token_ids: str | None,
    file: str | None,
    is_chat: bool,
    system: str | None,
    thinks: bool | None,
) -> PromptForm:
    if file is not None:
        if text is not None:
            raise ConfigError("--prompt and --file exclude each other: leave one out")
        text = read_text(file).removesuffix("\n")
    if is_chat and text is not None:
        if chat is not None:
            raise ConfigError("--chat is a chat message already: leave out -st and --prompt")
        text, chat = None, text
    return PromptForm(text, chat, token_ids, system, thinks)


system_option = click.option(
    *names("--system"), "system", metavar="TEXT", help="System message of the chat."
)


def prompt_options(command: Command) -> Command:
    """Add --prompt and the other forms, --batch among them, as argument `prompt`: a PromptForm or BatchFiles."""
    options = [
        click.option(
            *names("--prompt"),
            "text",
            metavar="TEXT",
            help="Continue this text; - reads stdin. The names of special tokens in it count as them.",
        ),
        click.option(
            "--chat",
            metavar="TEXT",
            help="Answer this message, by the model's chat template; - reads stdin.",
        ),
        click.option(
            "--prompt-tokens",
            "token_ids",
            metavar="IDS",
            help="Continue these token ids, such as 1,2,3; - reads stdin.",
        ),
        click.option(
            *names("--file"),
            "file",
            type=click.Path(exists=True, dir_okay=False, allow_dash=True),
            metavar="FILE",
            help="Continue the text of this file, as --prompt does.",
        ),
        click.option(
            "-st",
            "--single-turn",
            "is_chat",
            is_flag=True,
            help="Take the text of --prompt or --file as a chat message, as --chat does.",
        ),
        system_option,
        think_option(click.Option),
        click.option(
            "--batch",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Answer the requests in this file, each a line as in OpenAI's batches.",
        ),
        click.option(
            "--out",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Where the answers of --batch go, a line each. What is answered there already is not asked again.",
        ),
    ]
    parameters = (
        "text",
        "chat",
        "token_ids",
        "file",
        "is_chat",
        "system",
        "thinks",
        "batch",
        "out",
    )
    decorate: Callable[[Command], Command] = gather(
        "prompt", options, parameters, lambda values: _form_or_files(**values)
    )
    return decorate(command)
