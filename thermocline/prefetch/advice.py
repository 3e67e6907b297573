"""Tells the kernel which byte ranges of the mapped file are wanted. Blocking: never on an event loop.

The calls are made by the native core, which releases the interpreter lock: reading ahead from a slow
disk takes milliseconds, and Python's own mmap.madvise would stop every other thread meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol

from thermocline.kernels.native import load_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.experts.catalog import ByteSpan
    from thermocline.kernels.contract import ByteArray
    from thermocline.modelfile.reader import ModelFile

# Linux reads at most the device's read-ahead size per call, 128 KiB by default, and drops the rest.
PIECE_BYTES = 128 << 10


class WillNeed(Protocol):
    """Advises mapping[start:end], `piece_bytes` at a time; returns the bytes advised, or -errno."""

    def __call__(self, mapping: ByteArray, start: int, end: int, piece_bytes: int) -> int:
        """Ask for the pages."""
        ...


class PageAdvisor:
    """Advises exactly the pages that compute will read, of the very mapping that it reads from."""

    def __init__(self, file: ModelFile, will_need: WillNeed | None = None) -> None:
        self._maps = [file.mapping(shard) for shard in range(file.num_shards)]
        self._will_need: WillNeed = load_native().will_need if will_need is None else will_need

    def will_need(self, spans: Iterable[ByteSpan]) -> int:
        """Advise the pages of `spans`; returns the bytes advised, from the start of each first page.

        Raises OSError when the kernel refuses, and RuntimeError on a thread that runs an event loop: a
        call that reads from disk would stall it.
        """
        _refuse_event_loop()
        total_bytes = 0
        for span in spans:
            advised = self._will_need(self._maps[span.shard], span.start, span.end, PIECE_BYTES)
            if advised < 0:
                raise OSError(-advised, os.strerror(-advised))
            total_bytes += advised
        return total_bytes


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("page advice blocks and must not run on an event loop's thread")
