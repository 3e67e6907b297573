"""How values and unknown names are shown to people. Pure; knows no setting by name."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ShowsChanges:
    """A dataclass, made with repr=False, that is shown by those fields alone that differ from their defaults."""

    __slots__ = ()

    def __repr__(self) -> str:
        changes = []
        for field in fields(self):  # type: ignore[arg-type] # its children are dataclasses
            value, make = getattr(self, field.name), field.default_factory
            if value != (field.default if make is MISSING else make()):
                changes.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(changes)})"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the names that somebody may have meant, "a or b"; empty for none."""
    return " or ".join(difflib.get_close_matches(name, sorted(known), n=3))


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """Return the text of an error about a name that is none of `known`."""
    names = sorted(known)
    meant = nearest(name, names)
    hint = f"did you mean {meant}?" if meant else f"there are {', '.join(names)}"
    return f"there is no {what} {name!r}: {hint}"
