"""The folder in which clients save prompt caches: names that may be used there, and how much room is left."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from thermocline.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

# No separators, no hidden files, nothing that a shell or another system reads otherwise.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +-]{0,126}")
_RESERVED: Final = (".", " ")


class SlotFolder:
    """One folder, and the turn of who saves there."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self.turn = asyncio.Lock()
        """Held while a file is saved, so that two together stay within the limit."""

    def path(self, name: str | None) -> Path:
        """Return the path of a file that a client names. Raises RequestError for what is no plain name."""
        if name is None or not _NAME.fullmatch(name) or name.endswith(_RESERVED):
            shown = "missing" if name is None else repr(name[:64])
            raise RequestError(
                f"filename is {shown}: send a name of letters, digits and ._+-, without any folder",
                param="filename",
            )
        return self._folder / name

    def bytes_left_for(self, path: Path) -> int:
        """Return how large a file may be. One that it replaces does not count; others than files do not either."""
        used = 0
        for each in self._folder.iterdir():
            if each != path and each.is_file():
                used += each.stat().st_size
        return max(0, self._max_bytes - used)
