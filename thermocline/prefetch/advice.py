"""Tells the kernel which byte ranges of the mapped file are wanted. Blocking: never on an event loop."""

from __future__ import annotations

import asyncio
import mmap
from typing import TYPE_CHECKING

from thermocline.units import align_down

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.experts.catalog import ByteSpan
    from thermocline.modelfile.reader import ModelFile


class PageAdvisor:
    """Calls madvise on exactly the pages that compute will read, of the mapping that it reads from."""

    def __init__(self, file: ModelFile) -> None:
        self._maps = [_mapping_of(file, shard) for shard in range(file.num_shards)]

    def will_need(self, spans: Iterable[ByteSpan]) -> int:
        """Advise the pages of `spans`; returns the bytes advised, whole pages counted.

        Raises RuntimeError on a thread that runs an event loop: a page fault there stalls everybody.
        """
        _refuse_event_loop()
        total_bytes = 0
        for span in spans:
            start = align_down(span.start, mmap.PAGESIZE)
            self._maps[span.shard].madvise(mmap.MADV_WILLNEED, start, span.end - start)
            total_bytes += span.end - start
        return total_bytes


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("page advice blocks and must not run on an event loop's thread")


def _mapping_of(file: ModelFile, shard: int) -> mmap.mmap:
    mapping: object = file.mapping(shard).base
    assert isinstance(mapping, mmap.mmap), "a model file's mapping is np.memmap over one mmap"
    return mapping
