"""Tables of models that can be had by name: a repository's quantisations, and what is on this machine.

Says of each whether it fits this machine's memory, by its size alone: `thermocline plan` knows the rest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thermocline.cli.console import without_controls
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.hub.variants import Variant


HUB_CACHE: Final = "hub cache"


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for a model's bytes: the host's for files, and what is free on the GPU."""

    host_bytes: int
    device_bytes: int

    @classmethod
    def here(cls) -> Room:
        """Return this machine's, as `plan` takes it."""
        from thermocline.kernels.gpu.memory import device_memory
        from thermocline.prefetch.memory import page_cache_room_bytes

        device = device_memory()
        return cls(page_cache_room_bytes(), 0 if device is None else device[1])

    def verdict(self, nbytes: int) -> str:
        """Return where a model of this size would be."""
        if nbytes <= self.host_bytes:
            return "fits the memory"
        if nbytes <= self.host_bytes + self.device_bytes:
            return "fits memory and GPU together"
        lacking = nbytes - self.host_bytes - self.device_bytes
        return f"read from disk: {format_bytes(lacking)} more than there is memory"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One model on this machine. source: whose it is. nbytes: of all its files."""

    name: str
    source: str
    nbytes: int
    path: str


def quants_table(repo: str, variants: Sequence[Variant], room: Room | None = None) -> Table:
    """Return the models of a repository with their sizes and whether they fit."""
    room = Room.here() if room is None else room
    table = Table(title=_plain(repo), box=box.SIMPLE, title_justify="left", title_style="bold")
    table.add_column("quantisation", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("files", justify="right")
    table.add_column("on this machine")
    for each in variants:
        verdict = room.verdict(each.nbytes)
        if each.num_missing:
            verdict = f"{each.num_missing} parts are missing"
        table.add_row(
            _plain(each.selector), format_bytes(each.nbytes), str(len(each.files)), verdict
        )
    return table


def models_table(models: Iterable[ListedModel], room: Room | None = None) -> Table:
    """Return what is on this machine: names, sizes, whether they fit, and the file of those that have no name for -hf."""
    room = Room.here() if room is None else room
    table = Table(box=box.SIMPLE)
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("of")
    table.add_column("on this machine")
    table.add_column("file", overflow="fold")
    for each in models:
        row = (each.name, format_bytes(each.nbytes), each.source, room.verdict(each.nbytes))
        path = "" if each.source == HUB_CACHE else each.path
        table.add_row(*map(_plain, (*row, path)))
    return table


def show_on_stderr(table: Table) -> None:
    """Print a table where notes go, so that stdout has results alone."""
    Console(file=sys.stderr, markup=False, highlight=False, emoji=False).print(table)


def _plain(text: str) -> Text:
    """Return text that a file or the hub made, as it may be shown."""
    return Text(without_controls(text).replace("\n", " "))
