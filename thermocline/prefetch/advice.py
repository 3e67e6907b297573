"""Brings byte ranges of the mapped file into memory and lets them go. Blocking: never on an event loop.

The calls are made by the native core, which releases the interpreter lock: reading from a slow disk takes
milliseconds, and Python's own mmap.madvise would stop every other thread meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from thermocline.kernels.native import load_native
from thermocline.prefetch.foreign_files import ForeignFiles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.experts.catalog import ByteSpan
    from thermocline.kernels.weight import ByteArray
    from thermocline.modelfile.reader import ModelFile


class PageCall(Protocol):
    """Does something to the pages of mapping[start:end]; returns their bytes, or -errno."""

    def __call__(self, mapping: ByteArray, start: int, end: int) -> int:
        """Make the call. Blocks."""
        ...


class PageCalls(Protocol):
    """The compiled core's calls, or what stands in for them."""

    fetch_pages: PageCall
    fetch_huge_pages: PageCall
    allow_huge_pages: PageCall
    release_pages: PageCall
    unmap_pages: PageCall
    stop_read_ahead: PageCall


class PageAdvisor:
    """Reads and releases pages of the mapping that compute reads from."""

    def __init__(self, file: ModelFile, calls: PageCalls | None = None) -> None:
        self._maps = [file.mapping(shard) for shard in range(file.num_shards)]
        self._foreign = ForeignFiles(file)
        native: PageCalls = calls or load_native()
        self._calls = native
        self._has_huge_pages = False

    def fetch(self, span: ByteSpan, *, in_huge_pages: bool = False) -> int:
        """Read every page that holds a byte of `span`; returns their bytes once they are in memory.

        in_huge_pages: by the huge pages that `allow_huge_pages` told the kernel of, so that neighbours come too, for a tenth of the
        processor's time. Raises OSError when the kernel refuses, and RuntimeError on a thread that runs an event loop: a
        call that reads from disk would stall it.
        """
        is_huge = in_huge_pages and self._has_huge_pages
        return self._call(
            self._calls.fetch_huge_pages if is_huge else self._calls.fetch_pages, span
        )

    def release(self, span: ByteSpan) -> int:
        """Let go of the pages that lie wholly inside `span`; returns their bytes. Raises as `fetch`.

        Pages of another user's file stay in memory while another process has them mapped.
        """
        if span.shard in self._foreign:
            nbytes = self._call(self._calls.unmap_pages, span)
            self._drop(span)
            return nbytes
        nbytes = self._call(self._calls.release_pages, span)
        # Of a huge page that is only partly in the span, that call has made small ones, and has let none of them go.
        with suppress(OSError):
            self._drop(span)
        return nbytes

    def _drop(self, span: ByteSpan) -> None:
        """Let go of pages that nobody has mapped. Raises OSError."""
        descriptor, length = self._foreign.descriptor(span.shard), span.end - span.start
        os.posix_fadvise(descriptor, span.start, length, os.POSIX_FADV_DONTNEED)

    def stop_read_ahead(self, spans: Iterable[ByteSpan]) -> None:
        """Let the kernel read no neighbours of a page that compute misses in `spans`.

        Does not read, and may be called on any thread. Raises OSError.
        """
        for span in spans:
            _checked(self._calls.stop_read_ahead(self._maps[span.shard], span.start, span.end))

    def allow_huge_pages(self, spans: Iterable[ByteSpan]) -> None:
        """Let the kernel read and map huge pages (2 MiB) wherever a page is missing of `spans`.

        Does not read, and may be called on any thread. Raises OSError where the kernel has none; all is read
        by small pages then.
        """
        for span in spans:
            _checked(self._calls.allow_huge_pages(self._maps[span.shard], span.start, span.end))
            self._has_huge_pages = True

    def _call(self, call: PageCall, span: ByteSpan) -> int:
        _refuse_event_loop()
        return _checked(call(self._maps[span.shard], span.start, span.end))


def _checked(done: int) -> int:
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return done


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("page advice blocks and must not run on an event loop's thread")
