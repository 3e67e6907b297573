"""Settings of the engine by name: which there are, and how a value that Python code gives becomes a field.

A setting is called as its flag is: --hot-device is `hot_device` here. Knows neither command line nor engine.
"""

from __future__ import annotations

import os
import types
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from thermocline.config import ALL_LAYERS, EngineConfig
from thermocline.errors import ConfigError
from thermocline.units import parse_bytes
from thermocline.wording import unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_KINDS: Final[Mapping[object, str]] = {int: "an integer", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting and its place: the field `name` of `section` ("" is the config itself).

    flag: its name on the command line; "--x/--no-x" is one of two states.
    """

    section: str
    name: str
    flag: str
    help: str
    default: object
    type: object

    @property
    def key(self) -> str:
        """Its name in Python code and in files of settings."""
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")

    @property
    def kind(self) -> Any:  # noqa: ANN401 - a type form
        """Its type without None."""
        return without_none(self.type)

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, written with a unit."""
        return self.name.endswith("_bytes")

    def checked(self, value: object) -> object:
        """Return what the field holds for `value`. Raises ConfigError for a value of another type."""
        if value is None and self.type != self.kind:
            return None
        if self.is_size and isinstance(value, str):
            return parse_bytes(value)
        if self.name == "gpu_layers" and isinstance(value, str):
            return parse_layers(value)
        if self.kind is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        if get_origin(self.kind) is tuple:
            return self._checked_texts(value)
        if get_origin(self.kind) is Literal:
            return value  # the config's own check names the choices
        if self.kind is bool:
            wanted, fits = "true or false", isinstance(value, bool)
        else:
            wanted = _KINDS[self.kind]
            taken = (int, float) if self.kind is float else self.kind
            fits = isinstance(value, taken) and not isinstance(value, bool)
        if not fits:
            raise ConfigError(f"{self.key} is {value!r}: give {wanted}")
        return value

    def _checked_texts(self, value: object) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{self.key} is {value!r}: give a text, or several in a list")
        return tuple(texts)


@cache
def engine_settings() -> tuple[Setting, ...]:
    """Return the settings of `EngineConfig` that have a flag."""
    found = list(_settings_of(EngineConfig, ""))
    for name, kind in get_type_hints(EngineConfig).items():
        if is_dataclass(kind):
            found += _settings_of(kind, name)
    return tuple(found)


def with_settings(config: EngineConfig, values: Mapping[str, object]) -> EngineConfig:
    """Return `config` with some settings changed, by their names (`hot_device="cpu"`).

    A section may be given whole (`memory=MemoryConfig(...)`). Raises ConfigError for a name that there is not, and
    for a value that can not be.
    """
    known = {setting.key: setting for setting in engine_settings()}
    sections = {field.name for field in fields(EngineConfig)} - known.keys()
    changes: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        if name in sections:
            config = _with_section(config, name, value)
        elif name in known:
            setting = known[name]
            changes.setdefault(setting.section, {})[setting.name] = setting.checked(value)
        else:
            raise ConfigError(unknown_name(name, [*known, *sections], "setting of the engine"))
    top: dict[str, Any] = changes.pop("", {})
    for section, given in changes.items():
        top[section] = replace(getattr(config, section), **given)
    return replace(config, **top)


def parse_layers(text: str) -> int | None:
    """Return the number of layers that `text` means: a number, "all", or None for "auto". Raises ConfigError."""
    if text == "auto":
        return None
    try:
        return ALL_LAYERS if text == "all" else int(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no number of layers: write a number, all or auto"
        ) from error


def without_none(hint: object) -> Any:  # noqa: ANN401 - a type form
    """Return X for `X | None`, everything else as it is."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (kind,) = (part for part in get_args(hint) if part is not type(None))
    return kind


def _with_section(config: EngineConfig, name: str, value: object) -> EngineConfig:
    wanted = type(getattr(config, name))
    if not isinstance(value, wanted):
        raise ConfigError(f"{name} is {value!r}: give a {wanted.__name__}")
    changed: dict[str, Any] = {name: value}
    return replace(config, **changed)


def _settings_of(config_class: Any, section: str) -> list[Setting]:  # noqa: ANN401 - a class
    hints = get_type_hints(config_class)
    return [
        Setting(
            section,
            field.name,
            field.metadata["flag"],
            field.metadata["help"],
            field.default,
            hints[field.name],
        )
        for field in fields(config_class)
        if "flag" in field.metadata
    ]
