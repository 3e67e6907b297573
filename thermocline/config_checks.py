"""Checks of a setting's value, and how a field carries its flag and help text. Knows no setting."""

from __future__ import annotations

from dataclasses import field
from typing import Any, get_args

from thermocline.errors import ConfigError


def setting(default: Any, flag: str, help_text: str) -> Any:  # noqa: ANN401 - dataclasses.field is Any
    """Return a dataclass field that carries its command-line flag and help text."""
    return field(default=default, metadata={"flag": flag, "help": help_text})


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(name: str, value: object, choices: object) -> None:
    """Raise ConfigError for a value that is not one of `choices`, a Literal."""
    allowed = get_args(choices)
    require(value in allowed, f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def require_at_least(name: str, value: float | None, least: int) -> None:
    """Raise ConfigError for a number below `least`; None passes."""
    need = f"be at least {least}" if least else "not be negative"
    require(value is None or value >= least, f"{name} is {value}; it must {need}")


def require_within(name: str, value: float | None, low: int, high: int) -> None:
    """Raise ConfigError for a number outside [low, high]; None passes."""
    require(value is None or low <= value <= high, f"{name} is {value}; choose {low} to {high}")
