"""Looks whether the files of an open model were changed, as often as it is asked.

A file that was replaced under its name is only logged, once: the mapping still has the old one.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.errors import ModelChangedError
    from thermocline.modelfile.reader import ModelFile

_LOG: Final = logging.getLogger("thermocline.modelfile")
_LOOK_AT_NAMES_S: Final = 1.0


class ModelWatch:
    """Asked before tokens are given out. One thread at a time."""

    def __init__(self, file: ModelFile, now_s: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._now_s = now_s
        self._next_look_s = now_s() + _LOOK_AT_NAMES_S
        self._change: ModelChangedError | None = None
        self._was_replaced = False

    def change(self) -> ModelChangedError | None:
        """Return why what is computed from the model may be wrong; stays what it was first. A system call per file."""
        if self._change is None:
            self._change = self._file.find_change()
            if not self._was_replaced and self._now_s() >= self._next_look_s:
                self._look_at_names()
        return self._change

    def _look_at_names(self) -> None:
        self._next_look_s = self._now_s() + _LOOK_AT_NAMES_S
        path = self._file.find_replaced()
        if path is not None:
            self._was_replaced = True
            _LOG.warning(
                "%s was replaced or removed: the file that was opened is used on; open the model again for "
                "the new one",
                path,
            )
