"""The flags of `thermocline serve` that make a ServerConfig. Knows no server."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import click

from thermocline.cli.llama_flags import names
from thermocline.cli.options import gather
from thermocline.cli.sources import SettingOption
from thermocline.server.core.settings import OnModelChange, ServerConfig, keys_in_file

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
        for name in ("allowed_hosts", "cors_origins"):
            fields[name] = _split(fields[name])
        return replace(_DEFAULTS, **fields)

    return make


def _split(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts between commas of all texts."""
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
