"""Where a setting comes from: its flag, else its variable, else the user's file, else its default. The one rule.

A setting is called ctx in the file, THERMOCLINE_CTX in the environment and --ctx on the command line. Knows no setting
by name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from thermocline.environment import setting_variables, settings_path
from thermocline.errors import ConfigError
from thermocline.wording import unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_SOURCES: Final = f"{__name__}.sources"
_ORIGINS: Final = f"{__name__}.origins"


@dataclass(frozen=True, slots=True)
class Found:
    """The texts of a setting's values, as a command line would have them, and where they stand."""

    texts: tuple[str, ...]
    origin: str


class SettingOption(click.Option):
    """A flag whose value may come from a variable or a file. Of its long names, the first is ours."""

    @property
    def key(self) -> str:
        """What the setting is called."""
        ours = next(name for name in self.opts if name.startswith("--"))
        return ours.removeprefix("--").replace("-", "_")

    def consume_value(
        self, ctx: click.Context, opts: Mapping[str, Any]
    ) -> tuple[Any, ParameterSource]:
        """Return the value and where it is from."""
        value, source = super().consume_value(ctx, opts)
        if source is not ParameterSource.DEFAULT:
            return value, source
        found = sources_of(ctx).find(ctx.info_name or "", self.key, is_list=self.multiple)
        if found is None:
            return value, source
        ctx.meta.setdefault(_ORIGINS, {})[ctx.info_name, self.name] = found.origin
        return (found.texts if self.multiple else found.texts[0]), ParameterSource.DEFAULT_MAP

    def process_value(self, ctx: click.Context, value: object) -> object:
        """Return the checked value. Raises BadParameter, which names the variable or file."""
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            origin = origin_of(ctx, self.name)
            if origin is None:
                raise
            text = f"{error.message} It is from {origin}."
            raise click.BadParameter(text, ctx, self) from error


class Sources:
    """The values that variables and a file give to settings."""

    def __init__(
        self,
        variables: Mapping[str, str],
        path: Path | None,
        known: Mapping[str, Iterable[str]] | None,
    ) -> None:
        """known: the settings of each command, or None for unchecked. Raises ConfigError for an unusable file."""
        self._variables = variables
        self._path = path
        self._tables = _read(path)
        if known is not None:
            self._check(known)

    def find(self, command: str, key: str, *, is_list: bool = False) -> Found | None:
        """Return what a command's setting is given; None for nothing. Raises ConfigError for a value of no use."""
        name = variable_name(key)
        if text := self._variables.get(name):
            return Found(tuple(text.split()) if is_list else (text,), name)
        for table in (command, ""):
            if key in self._tables.get(table, {}):
                origin = f"{self._path} [{table}]" if table else str(self._path)
                texts = tuple(_texts(self._tables[table][key], f"{key} in {origin}"))
                if len(texts) != 1 and not is_list:
                    raise ConfigError(f"{key} in {origin} has {len(texts)} values: give one")
                return Found(texts, origin)
        return None

    def _check(self, known: Mapping[str, Iterable[str]]) -> None:
        every = {key for keys in known.values() for key in keys}
        for table, values in self._tables.items():
            if table and table not in known:
                raise ConfigError(f"{self._path}: {unknown_name(table, known, 'command')}")
            whose = f"setting of {table}" if table else "setting"
            for key in values:
                if key not in (known[table] if table else every):
                    names = known[table] if table else every
                    raise ConfigError(f"{self._path}: {unknown_name(key, names, whose)}")


def sources_of(ctx: click.Context) -> Sources:
    """Return the sources of this process's command, which are read once. Raises ConfigError for an unusable file."""
    sources: Sources | None = ctx.meta.get(_SOURCES)
    if sources is None:
        command = ctx.find_root().command
        known = known_settings(command) if isinstance(command, click.Group) else None
        sources = Sources(setting_variables(), settings_path(), known)
        ctx.meta[_SOURCES] = sources
    return sources


def known_settings(group: click.Group) -> dict[str, list[str]]:
    """Return the names of the settings of each command that has any."""
    keys = {
        name: [option.key for option in command.params if isinstance(option, SettingOption)]
        for name, command in group.commands.items()
    }
    return {name: found for name, found in keys.items() if found}


def origin_of(ctx: click.Context, parameter: str | None) -> str | None:
    """Return the variable or file that gave a parameter its value; None for a flag or default."""
    origin: str | None = ctx.meta.get(_ORIGINS, {}).get((ctx.info_name, parameter))
    return origin


def told_origins(parameters: Iterable[str]) -> str:
    """Return what to add to an error about these parameters of the running command: which are from elsewhere."""
    ctx = click.get_current_context()
    origins = sorted({origin for each in parameters if (origin := origin_of(ctx, each))})
    return f" (settings are also from {', '.join(origins)}: see thermocline config)" * bool(origins)


def variable_name(key: str) -> str:
    """Return the variable of a setting."""
    return f"THERMOCLINE_{key.upper()}"


def _read(path: Path | None) -> dict[str, dict[str, object]]:
    """Return the tables of a file, "" for what stands in none; dashes in names are underscores."""
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} can not be read as settings ({error}): mend it, or set THERMOCLINE_CONFIG to another file"
        ) from error
    tables: dict[str, dict[str, object]] = {"": {}}
    for name, value in values.items():
        if isinstance(value, dict):
            tables[name] = {key.replace("-", "_"): each for key, each in value.items()}
        else:
            tables[""][name.replace("-", "_")] = value
    return tables


def _texts(value: object, what: str) -> Iterator[str]:
    """Yield a value of a file as texts of a command line. Raises ConfigError for dates and tables."""
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, str | int | float):
            raise ConfigError(f"{what} is {each!r}: give a text, a number, true or false")
        yield str(each).lower() if isinstance(each, bool) else str(each)
