"""The flags of `thermocline serve` that make a ServerConfig. Knows no server."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import click

from thermocline.cli.llama_flags import names
from thermocline.cli.options import checked_size, gather
from thermocline.cli.sources import SettingOption
from thermocline.errors import ConfigError, RequestError
from thermocline.server.core.keep_alive import parse_keep_alive
from thermocline.server.core.settings import OnModelChange, ServerConfig, keys_in_file
from thermocline.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

Command = TypeVar("Command", bound="Callable[..., Any]")

_MIB: Final = 1 << 20
_DEFAULTS: Final = ServerConfig()

_setting = partial(click.option, cls=SettingOption)

# By the field of ServerConfig; only the key file has none.
_OPTIONS: Final = {
    "host": _setting(
        "--host",
        default=_DEFAULTS.host,
        show_default=True,
        metavar="TEXT",
        help="Address to listen at; others than this machine's own need a key (0.0.0.0 is all).",
    ),
    "port": _setting(
        "--port",
        type=int,
        default=_DEFAULTS.port,
        show_default=True,
        metavar="N",
        help="Port to listen at; 0 picks a free one.",
    ),
    "api_keys": _setting(
        "--api-key",
        "api_keys",
        multiple=True,
        metavar="TEXT",
        help="Key that clients must send; may be given several times. Who lists processes sees flags: "
        "better set THERMOCLINE_API_KEY, or give a file.",
    ),
    "api_key_file": _setting(
        "--api-key-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="File with a key on each line.",
    ),
    "is_insecure": _setting(
        "--insecure", "is_insecure", is_flag=True, help="Serve other machines without any key."
    ),
    "allowed_hosts": _setting(
        "--allowed-hosts",
        multiple=True,
        metavar="TEXT",
        help="Name by which clients may call this server, besides its address; may be given several "
        "times, * is any.",
    ),
    "cors_origins": _setting(
        "--cors-origins",
        multiple=True,
        metavar="TEXT",
        help="Origin whose web pages may call this server, as https://chat.example.org; may be given "
        "several times, * is any.",
    ),
    "max_connections": _setting(
        "--max-connections",
        type=int,
        default=_DEFAULTS.max_connections,
        show_default=True,
        metavar="N",
        help="Connections open at a time.",
    ),
    "max_body_bytes": _setting(
        "--max-body",
        "max_body_bytes",
        type=int,
        default=_DEFAULTS.max_body_bytes // _MIB,
        show_default=True,
        metavar="N",
        help="Largest request, in MiB.",
    ),
    "request_timeout_s": _setting(
        *names("--request-timeout"),
        "request_timeout_s",
        type=float,
        metavar="X",
        help="Seconds that an answer may take, from the header of its request on (default: no limit).",
    ),
    "any_model": _setting(
        "--any-model", is_flag=True, help="Serve requests that name another model too."
    ),
    "strict_params": _setting(
        "--strict-params", is_flag=True, help="Refuse unknown fields instead of ignoring them."
    ),
    "trust_request_chat_template": _setting(
        "--trust-request-chat-template",
        is_flag=True,
        help="Let requests bring a chat template: a program of the client's.",
    ),
    "on_model_change": _setting(
        "--on-model-change",
        type=click.Choice(get_args(OnModelChange)),
        default=_DEFAULTS.on_model_change,
        show_default=True,
        help="When the model's file is truncated or overwritten, running answers end with an error. Then the model is "
        "opened again as soon as the file is whole (reopen), or the server ends (exit).",
    ),
    "models": _setting(
        *names("--models"),
        "models",
        multiple=True,
        type=click.Path(exists=True),
        metavar="FOLDER|LIST.toml",
        help="Serve all model files below a folder, or those of a list, each loaded when a request names it; may be given "
        "several times.",
    ),
    "keep_alive_s": _setting(
        "--keep-alive",
        "keep_alive_s",
        metavar="TIME",
        help="How long a model stays in memory after its last request, as 10m, 1h30m, 0 or -1 for ever (default: 5m with "
        "--models, else for ever); requests of Ollama's interface may say otherwise.",
    ),
    "load_timeout_s": _setting(
        "--load-timeout",
        "load_timeout_s",
        type=float,
        default=_DEFAULTS.load_timeout_s,
        show_default=True,
        metavar="X",
        help="Seconds that a request waits for its model to be loaded, before it is told to come again.",
    ),
    "models_memory_bytes": _setting(
        "--models-memory",
        "models_memory_bytes",
        callback=checked_size,
        metavar="SIZE",
        help="What loaded models may take of the memory together, by their files and caches (default: what is available "
        "at the start).",
    ),
    "allows_model_changes": _setting(
        "--allow-model-changes",
        "allows_model_changes",
        is_flag=True,
        help="Let clients download models from the hub and remove them (/api/pull, /api/delete); with --models alone.",
    ),
    "slot_folder": _setting(
        "--slot-save-path",
        "slot_folder",
        type=click.Path(exists=True, file_okay=False, writable=True),
        metavar="FOLDER",
        help="Let clients save prompt caches to files in this folder, and restore them (/slots).",
    ),
    "max_slots_bytes": _setting(
        "--slot-save-limit",
        "max_slots_bytes",
        callback=checked_size,
        default=f"{_DEFAULTS.max_slots_bytes >> 30}GiB",
        show_default=True,
        metavar="SIZE",
        help="What these files may take together.",
    ),
    "shutdown_timeout_s": _setting(
        "--shutdown-timeout",
        "shutdown_timeout_s",
        type=float,
        default=_DEFAULTS.shutdown_timeout_s,
        show_default=True,
        metavar="X",
        help="Seconds that running answers may go on after Ctrl-C or SIGTERM.",
    ),
}


def server_options(command: Command) -> Command:
    """Add the flags as argument `listen`, a function that makes the ServerConfig. It raises ConfigError."""
    decorate: Callable[[Command], Command] = gather(
        "listen", list(_OPTIONS.values()), list(_OPTIONS), _make_config
    )
    return decorate(command)


def _make_config(values: dict[str, Any]) -> Callable[[], ServerConfig]:
    """Return a function that makes the config, so that its errors are reported without the usage text."""

    def make() -> ServerConfig:
        fields = dict(values)
        file: Path | None = fields.pop("api_key_file")
        if file is not None:
            fields["api_keys"] += keys_in_file(file.read_text(errors="replace"))
        fields["max_body_bytes"] *= _MIB
        for name in ("models_memory_bytes", "max_slots_bytes"):
            fields[name] = None if fields[name] is None else parse_bytes(fields[name])
        fields["keep_alive_s"] = _seconds(fields["keep_alive_s"])
        for name in ("allowed_hosts", "cors_origins"):
            fields[name] = _split(fields[name])
        return replace(_DEFAULTS, **fields)

    return make


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_keep_alive(text)
    except RequestError as error:
        raise ConfigError(
            f"--keep-alive is {text!r}: give a time such as 10m, 1h30m or 90s, 0, or -1 for ever"
        ) from error


def _split(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts between commas of all texts."""
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
