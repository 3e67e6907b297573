"""Carries one request's events from the engine's thread to its reader's event loop.

Never makes the engine wait: a reader that falls behind finds several tokens in one event.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.messages import PromptProgress, TokenEvent

if TYPE_CHECKING:
    from thermocline.messages import RequestEvent

# Separate events that may wait before they are merged; a reader this far behind does not notice.
_MAX_PENDING = 16


class Mailbox:
    """One writer thread, one reading task. Bounded, because waiting events are merged."""

    def __init__(self, reader_loop: asyncio.AbstractEventLoop) -> None:
        self._loop = reader_loop
        self._lock = threading.Lock()
        self._events: deque[RequestEvent] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: RequestEvent) -> None:
        """Leave an event; from the engine's thread, never waits."""
        with self._lock:
            last = self._events[-1] if self._events else None
            merged = _merged(last, event, crowded=len(self._events) >= _MAX_PENDING)
            if merged is not None:
                self._events[-1] = merged
            else:
                self._events.append(event)
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            # The reader's loop is closed: nobody is left to wake.
            return

    async def get(self) -> RequestEvent:
        """Take the oldest event, waiting for one."""
        while True:
            self._arrived.clear()
            with self._lock:
                if self._events:
                    return self._events.popleft()
            await self._arrived.wait()


def _merged(
    last: RequestEvent | None, event: RequestEvent, *, crowded: bool
) -> RequestEvent | None:
    """Return one event that says both, or None when they must stay apart."""
    if isinstance(last, PromptProgress) and isinstance(event, PromptProgress):
        return event
    if not (crowded and isinstance(last, TokenEvent) and isinstance(event, TokenEvent)):
        return None
    return replace(
        event,
        token_ids=last.token_ids + event.token_ids,
        text=last.text + event.text,
        logprobs=last.logprobs + event.logprobs,
        top_logprobs=last.top_logprobs + event.top_logprobs,
    )
