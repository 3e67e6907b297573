"""`thermocline config`: what each setting is, and where its value comes from. Runs no command."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import click
from click.core import ParameterSource

from thermocline.cli.console import echo_json, show
from thermocline.cli.options import json_option
from thermocline.cli.sources import SettingOption, known_settings, origin_of, variable_name
from thermocline.environment import setting_variables, settings_path
from thermocline.errors import ConfigError
from thermocline.wording import nearest, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_SECRET: Final = "api_key"
_OTHER_VARIABLES: Final = ("THERMOCLINE_CACHE", "THERMOCLINE_CONFIG")


@dataclass(frozen=True, slots=True)
class _Row:
    """One setting of some commands with its value and where that is from."""

    key: str
    value: object
    origin: str


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Show every setting, and where its value comes from.",
)
@json_option
@click.argument("command", required=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def config(ctx: click.Context, as_json: bool, command: str | None, flags: tuple[str, ...]) -> None:
    """Show what each setting of COMMAND (default: of all) is, and where its value comes from.

    \b
    Examples:
      thermocline config
      thermocline config serve
      thermocline config run --ctx 8192 -ngl 10
      THERMOCLINE_THREADS=4 thermocline config --json

    A flag counts over a variable, a variable over the file, the file over the default. --ctx is THERMOCLINE_CTX in the
    environment and ctx in the file, ~/.config/thermocline/config.toml (THERMOCLINE_CONFIG names another). What stands in a
    table of the file, such as [serve], is for that command alone.
    """
    group = cast("click.Group", ctx.find_root().command)
    known = known_settings(group)
    if command is not None and command not in known:
        raise ConfigError(unknown_name(command, known, "command with settings"))
    found: dict[_Row, list[str]] = defaultdict(list)
    for name in known if command is None else [command]:
        for row in _rows(ctx, group.commands[name], flags):
            found[row].append(name)
    unknown = sorted(_unknown_variables(known))
    if as_json:
        echo_json(_as_json(found, unknown))
        return
    _show(found, known if command is None else {command: known[command]})
    for name in unknown:
        meant = nearest(name.removeprefix(variable_name("")).lower(), _keys(known))
        also = f": did you mean {variable_name(meant)}?" if meant else ""
        click.echo(f"Nothing reads the variable {name}{also}")


def _rows(ctx: click.Context, command: click.Command, flags: Sequence[str]) -> Iterator[_Row]:
    """Yield the settings with which `command` would run, given these flags."""
    running = click.Context(command, info_name=command.name, parent=ctx.find_root())
    # Not the command's own parsing: it may want a file, or refuse what is no setting.
    values, _, _ = command.make_parser(running).parse_args(list(flags))
    for option in command.params:
        if not isinstance(option, SettingOption):
            continue
        value, _ = option.handle_parse_result(running, values, [])
        if value == () or not isinstance(value, str | int | float | tuple):
            value = None  # nothing, or click's mark of an option without a default
        if option.key == _SECRET and value:
            value = "***"
        origin = origin_of(running, option.name)
        if origin is None:
            source = running.get_parameter_source(option.name or "")
            origin = "default" if source is ParameterSource.DEFAULT else "flag"
        yield _Row(option.key, value, origin)


def _unknown_variables(known: dict[str, list[str]]) -> Iterator[str]:
    """Yield the variables that look like settings and are none."""
    names = {variable_name(key) for key in _keys(known)} | set(_OTHER_VARIABLES)
    yield from setting_variables().keys() - names


def _keys(known: dict[str, list[str]]) -> Iterable[str]:
    return {key for keys in known.values() for key in keys}


def _file_text() -> str:
    path = settings_path()
    if path is None:
        return "none"
    return str(path) if path.exists() else f"{path} (not there)"


def _as_json(found: dict[_Row, list[str]], unknown: list[str]) -> dict[str, Any]:
    settings = [
        {"name": row.key, "value": row.value, "from": row.origin, "commands": commands}
        for row, commands in found.items()
    ]
    path = settings_path()
    file = None if path is None else {"path": str(path), "is_there": path.exists()}
    return {"file": file, "settings": settings, "unknown_variables": unknown}


def _show(found: dict[_Row, list[str]], known: dict[str, list[str]]) -> None:
    from rich.table import Table

    click.echo(f"file: {_file_text()}\n")
    table = Table(box=None)
    for head in ("setting", "value", "from"):
        table.add_column(head, overflow="fold")
    for row, commands in found.items():
        everywhere = [name for name, keys in known.items() if row.key in keys]
        label = row.key if commands == everywhere else f"{row.key} ({', '.join(commands)})"
        table.add_row(label, _value_text(row.value), row.origin)
    show(table)


def _value_text(value: object) -> str:
    match value:
        case None:
            return "-"
        case tuple():
            return " ".join(map(str, value))
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)
