"""Carries one request's events from the engine's thread to its reader's event loop.

The engine never waits for a reader. A slow reader gets several tokens in one event. A much too slow one is
reported by `is_overfull`.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop as running_loop  # None where there is none
from collections import deque
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from thermocline.messages import PromptProgress, RequestFailed, TokenEvent

if TYPE_CHECKING:
    from thermocline.messages import RequestEvent

# Events that may wait before new ones are merged. A reader this far behind does not mind.
_MAX_PENDING = 16


class Mailbox:
    """One writer thread, one reading task.

    Token events beyond the first few are merged when the reader takes them, so `put` costs the same however
    far behind the reader is. max_entries: how many tokens and top log-probabilities may wait.
    """

    def __init__(
        self, reader_loop: asyncio.AbstractEventLoop, max_entries: int | None = None
    ) -> None:
        self._loop = reader_loop
        self._max_entries = max_entries
        self._num_entries = 0
        self._lock = threading.Lock()
        self._runs: deque[list[RequestEvent]] = deque()
        self._is_waking = False
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Events that wait, merged ones counted once."""
        return len(self._runs)

    @property
    def is_overfull(self) -> bool:
        """Whether more entries wait than `max_entries`."""
        return self._max_entries is not None and self._num_entries > self._max_entries

    def put(self, event: RequestEvent) -> None:
        """Add an event, from the engine's thread. Never waits for the reader.

        Of a failure the reader is told at once. Of all else it is told when that thread's loop has done what it is at,
        as it may be about to start the next step: a reader that runs beside it takes turns with it.
        """
        with self._lock:
            self._num_entries += _num_entries(event)
            last = self._runs[-1] if self._runs else None
            is_full = len(self._runs) >= _MAX_PENDING
            if last is not None and _are_both(PromptProgress, last[-1], event):
                last[-1] = event
            elif last is not None and is_full and _are_both(TokenEvent, last[-1], event):
                last.append(event)
            else:
                self._runs.append([event])
        loop = None if isinstance(event, RequestFailed) else running_loop()
        if loop is None:
            self._wake()
        elif not self._is_waking:
            self._is_waking = True
            loop.call_soon(self._wake)

    async def get(self) -> RequestEvent:
        """Wait for the oldest event, or run of merged token events, and take it."""
        while True:
            self._arrived.clear()
            with self._lock:
                run = self._runs.popleft() if self._runs else None
                self._num_entries -= sum(map(_num_entries, run or ()))
            if run is not None:
                return _as_one(run)
            await self._arrived.wait()

    def _wake(self) -> None:
        self._is_waking = False
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            # The reader's loop is closed: nobody is left to wake.
            return


def _num_entries(event: RequestEvent) -> int:
    if not isinstance(event, TokenEvent):
        return 0
    return len(event.token_ids) + sum(map(len, event.top_logprobs))


def _are_both(kind: type[RequestEvent], last: RequestEvent, event: RequestEvent) -> bool:
    return isinstance(last, kind) and isinstance(event, kind)


def _as_one(run: list[RequestEvent]) -> RequestEvent:
    tokens = [event for event in run if isinstance(event, TokenEvent)]
    if len(tokens) < 2:
        return run[0]
    return replace(
        tokens[-1],
        token_ids=tuple(chain.from_iterable(event.token_ids for event in tokens)),
        text="".join(event.text for event in tokens),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in tokens)),
        top_logprobs=tuple(chain.from_iterable(event.top_logprobs for event in tokens)),
    )
