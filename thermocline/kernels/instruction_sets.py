"""Which instruction set the core computes with: what was asked for, or the widest that the machine has. Knows no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType


def best_instruction_set(native: ModuleType) -> str:
    """Return the widest instruction set that this machine has."""
    available: list[str] = [name for name, usable in native.instruction_sets() if usable]
    return available[-1]


def has_tiles(isa: str) -> bool:
    """Return whether prompts are multiplied on matrix tiles with this instruction set."""
    return isa.startswith("amx")


def checked_instruction_set(native: ModuleType, wanted: str) -> str:
    """Return `wanted`, or the widest for "auto". Raises ConfigError for what cannot run here.

    Emulated sets are for tests: they must be named, and messages do not list them.
    """
    if wanted == "auto":
        return best_instruction_set(native)
    sets = dict(native.instruction_sets())
    usable = ", ".join(["auto", *(name for name, available in sets.items() if available)])
    if wanted not in sets and wanted in native.emulated_sets():
        return wanted
    if wanted not in sets:
        raise ConfigError(f"--cpu-isa is {wanted!r}, which this build does not have: use {usable}")
    if not sets[wanted]:
        raise ConfigError(f"--cpu-isa is {wanted!r}, but this processor lacks it: use {usable}")
    return wanted
