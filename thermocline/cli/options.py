"""Flags of the commands, made from the fields of the config classes: default, type, range and help
have one source. Knows no command, and nothing of what the settings do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from thermocline.cli.console import silence
from thermocline.cli.llama_flags import names
from thermocline.cli.sources import SettingOption, told_origins
from thermocline.config import EngineConfig
from thermocline.errors import ConfigError, RequestError
from thermocline.sampling.params import SamplingParams
from thermocline.settings import Setting, engine_settings, parse_layers, with_settings
from thermocline.units import parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]

_SAMPLING_FLAGS: Final = (
    (
        "max_tokens",
        "--max-tokens",
        "Longest answer, in tokens; -1 is no limit (default: until the model ends it or the context is full).",
    ),
    ("temperature", "--temperature", "Randomness, 0 to 2; 0 takes the most likely token."),
    ("top_k", "--top-k", "Choose among the K most likely tokens; 0 is off."),
    ("top_p", "--top-p", "Choose among the tokens that hold this share; 1 is off."),
    ("min_p", "--min-p", "Drop tokens below this share of the most likely one; 0 is off."),
    ("typical_p", "--typical-p", "Choose among tokens of typical surprise; 1 is off."),
    ("repetition_penalty", "--repetition-penalty", "Above 1 discourages repeating; 1 is off."),
    ("repeat_last_n", "--repeat-last-n", "Tokens that the penalty looks back on; -1 is all."),
    ("presence_penalty", "--presence-penalty", "Against tokens that were used; 0 is off."),
    ("frequency_penalty", "--frequency-penalty", "Against tokens by their count; 0 is off."),
    ("seed", "--seed", "Repeat a random answer (default, and -1: another one each time)."),
    ("stop", "--stop", "Text that ends the answer; may be given several times."),
    ("ignore_eos", "--ignore-eos", "Go on after the model's own end token."),
)
_METAVARS: Final[Mapping[object, str]] = {int: "N", float: "X", str: "TEXT"}


def _parameter(setting: Setting) -> str:
    """Return the name under which click hands the value over."""
    return f"{setting.section}_{setting.name}".lstrip("_")


def _option(setting: Setting) -> Option:
    """Return the click option of a setting, with llama.cpp's names of it."""
    kind = setting.kind
    attributes: dict[str, Any] = {"help": setting.help, "default": setting.default}
    attributes["show_default"] = not isinstance(setting.default, tuple) and kind is not bool
    if kind is bool:
        attributes["is_flag"] = True
        attributes["show_default"] = "/" in setting.flag
    elif get_origin(kind) is Literal:
        attributes["type"] = click.Choice(get_args(kind))
    elif get_origin(kind) is tuple:
        attributes |= {"type": get_args(kind)[0], "multiple": True, "metavar": "TEXT"}
    elif setting.is_size:
        attributes |= {"type": str, "metavar": "SIZE", "callback": parsed(parse_bytes)}
    elif setting.name == "gpu_layers":
        attributes |= {"type": str, "metavar": "N|all|auto", "callback": parsed(parse_layers)}
    else:
        attributes |= {"type": kind, "metavar": _METAVARS[kind]}
    return click.option(*names(setting.flag), _parameter(setting), cls=SettingOption, **attributes)


def parsed(parse: Callable[[str], int | None]) -> Callable[..., int | None]:
    """Return a callback that makes a usage error of what `parse` refuses."""

    def callback(
        context: click.Context, parameter: click.Parameter, text: str | None
    ) -> int | None:
        try:
            return None if text is None else parse(text)
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return callback


def checked_size(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> str | None:
    """Return the text of a size as it is: the callback of an option whose command reads it."""
    parsed(parse_bytes)(context, parameter, text)
    return text


def gather(
    target: str,
    options: Sequence[Option],
    parameters: Sequence[str],
    build: Callable[[dict[str, Any]], object],
) -> Callable[[Command], Command]:
    """Return a decorator that adds `options` and hands the command one argument named `target`.

    build makes it of the values of `parameters`; its ConfigError or RequestError is a usage error.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapper(*args: Any, **values: Any) -> Any:  # noqa: ANN401 - whatever the command takes
            taken = {name: values.pop(name) for name in parameters}
            try:
                built = build(taken)
            except (ConfigError, RequestError) as error:
                raise click.UsageError(f"{error}{told_origins(parameters)}") from error
            return command(*args, **values, **{target: built})

        decorated: Any = wrapper
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return] # click's decorators return what they got

    return decorate


def engine_options(*flags: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the named flags of `EngineConfig` as argument `config`.

    Without names, all that make sense for a command that serves one request.
    """
    wanted = flags or ONE_REQUEST_FLAGS
    known = {setting.flag: setting for setting in engine_settings()}
    settings = [known[flag] for flag in wanted]
    options = [_option(setting) for setting in settings]
    parameters = [_parameter(setting) for setting in settings]
    if "--kv-type" in wanted:
        options.append(_VALUE_TYPE)
        parameters.append("value_type")

    def build(values: dict[str, Any]) -> EngineConfig:
        keys, value_type = values.get("memory_kv_type"), values.pop("value_type", None)
        if value_type not in (None, keys):
            raise ConfigError(
                f"-ctv is {value_type}, but -ctk (--kv-type) is {keys}: keys and values have one type, give both the same"
            )
        given = {setting.key: values[_parameter(setting)] for setting in settings}
        return with_settings(EngineConfig(), given)

    return gather("config", options, parameters, build)


def engine_option(flag: str) -> Option:
    """Return the option of one flag of `EngineConfig`, with the checks of a config left to the command."""
    return next(_option(each) for each in engine_settings() if each.flag == flag)


_VALUE_TYPE: Final = click.option("-ctv", "--cache-type-v", "value_type", hidden=True)


PLACE_FLAGS: Final = (
    "--trunk-device",
    "--gpu-layers",
    "--override-tensor",
    "--cpu-moe",
    "--hot-device",
    "--hot-fraction",
    "--expert-cache",
    "--expert-budget",
    "--device-memory",
    "--hot-choice",
    "--hot",
    "--cold",
    "--n-cpu-moe",
    "--heat/--no-heat",
    "--heat-file",
    "--heat-save-interval",
    "--expert-worker",
    "--worker-share",
    "--worker-mode",
    "--worker-payload",
    "--worker-transport",
    "--worker-batch-capacity",
    "--on-worker-failure",
    "--worker-timeout",
    "--worker-secret-file",
    "--prefetch",
    "--kernels",
    "--cpu-isa",
    "--threads",
    "--pin-threads",
)
"""What computes where, and by which kernels: the same for one request and for a server."""

RANK_FLAGS: Final = (
    "--dp",
    "--tp",
    "--expert-exchange",
    "--expert-payload",
    "--expert-map",
    "--rank-transport",
    "--rank-timeout",
)
"""How several ranks share the model, of commands that torchrun may start."""

SPILL_FLAGS: Final = ("--cache-spill", "--cache-spill-dir", "--cache-spill-disk")
"""Where computed prompts go that the cache has no room for."""

ONE_REQUEST_FLAGS: Final = (
    "--ctx",
    "--kv-type",
    "--prefill-chunk",
    "--prompt-chunks",
    "--speculate",
    "--draft-model",
    "--chat-template-file",
    *PLACE_FLAGS,
)


def sampling_settings() -> list[Setting]:
    """Return the settings of `SamplingParams` that have a flag."""
    hints = get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    return [
        Setting("", name, flag, text, defaults[name], hints[name])
        for name, flag, text in _SAMPLING_FLAGS
    ]


def sampling_value(setting: Setting, text: str) -> Any:  # noqa: ANN401 - of any setting
    """Return the value that a text gives to a sampling setting, as its flag does; "default" is that.

    Raises RequestError for a text of the wrong kind.
    """
    if text == "default":
        return setting.default
    kind = setting.kind
    if get_origin(kind) is tuple:
        return (text,) if text else ()
    try:
        value = click.types.convert_type(kind).convert(text, None, None)
    except click.BadParameter as error:
        raise RequestError(f"{setting.key}: {error.message}", param=setting.name) from error
    return _without_minus_one(setting.name, value)


def _without_minus_one(name: str, value: Any) -> Any:  # noqa: ANN401 - of any setting
    """Return None for the -1 that stands for no limit, and for any seed."""
    return None if name in ("max_tokens", "seed") and value == -1 else value


def sampling_options(command: Command) -> Command:
    """Add the flags of `SamplingParams` as argument `params`."""
    settings = sampling_settings()

    def build(values: dict[str, Any]) -> SamplingParams:
        return SamplingParams(
            **{name: _without_minus_one(name, value) for name, value in values.items()}
        )

    decorate: Callable[[Command], Command] = gather(
        "params",
        [_option(setting) for setting in settings],
        [_parameter(setting) for setting in settings],
        build,
    )
    return decorate(command)


def model_argument(
    *, required: bool = False, before: str | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that adds the argument `model`, the path of a GGUF file, which -m may name instead.

    before: the name of a required argument that follows it. With -m or -hf, the only argument is that one.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapper(*args: Any, model: str | None, model_flag: str | None, **values: Any) -> Any:  # noqa: ANN401
            is_flagged = model_flag is not None or values.get("hf_repo") is not None
            if is_flagged and before is not None and values[before] is None:
                model, values[before] = None, model
            if model is not None and model_flag not in (None, model):
                raise click.UsageError(f"MODEL is {model}, but -m is {model_flag}: give one")
            given = {"model": model or model_flag} | ({before: values[before]} if before else {})
            is_required = required and values.get("hf_repo") is None
            for name, value in given.items():
                if value is None and (is_required or name != "model"):
                    raise click.MissingParameter(
                        param_hint=f"'{name.upper()}'", param_type="argument"
                    )
            return command(*args, model=given["model"], **values)

        decorated: Any = click.option(
            *names("--model"), "model_flag", metavar="MODEL", help="MODEL, for who is used to it."
        )(wrapper)
        place = "MODEL" if required else "[MODEL]"
        return click.argument("model", required=False, metavar=place)(decorated)  # type: ignore[no-any-return] # as above

    return decorate


heat_file_option = click.option(
    "--heat-file",
    metavar="FILE",
    help="The file in which their use is remembered (default: one in the user's cache directory).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
verbose_option = click.option(
    *names("--verbose"),
    "--explain",
    "is_verbose",
    is_flag=True,
    help="Print what was chosen once the model is open, each choice with its reason, to stderr.",
)
quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=silence,
    help="Print answers, tables and errors alone: no progress, no speed, no remarks.",
)
trace_option = click.option(
    "--trace",
    metavar="FILE",
    help="Write the timeline there as Chrome JSON (gzipped when the name ends in .gz).",
)


def parse_token_ids(text: str, flag: str) -> tuple[int, ...]:
    """Return the ids of "1,2,3" (spaces and line ends separate too). Raises ConfigError."""
    try:
        ids = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError as error:
        raise ConfigError(f"{flag} needs token ids such as 1,2,3: {error}") from error
    if not ids:
        raise ConfigError(f"{flag} has no token ids: give some, such as 1,2,3")
    return ids
