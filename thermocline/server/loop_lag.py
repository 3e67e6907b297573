"""Measures how late the server's event loop comes to what is due. Knows nothing of what makes it late."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Final

from thermocline.server.exposition import Histogram

_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
# Twenty looks a second cost nothing, and make a p99 of a minute's.
_LOOK_EVERY_S: Final = 0.05


class LoopLag:
    """How late the loop was, in seconds, and how much of it was not waiting for a processor.

    The second is what the server does to itself; the first includes what other programs do to it.
    """

    def __init__(self) -> None:
        self.lag = Histogram(_BOUNDS_S)
        self.stall = Histogram(_BOUNDS_S)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        thread = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while True:
            due_s, waited_s = loop.time() + _LOOK_EVERY_S, _waited_s(thread)
            await asyncio.sleep(_LOOK_EVERY_S)
            lag_s = max(0.0, loop.time() - due_s)
            self.lag.observe(lag_s)
            self.stall.observe(max(0.0, lag_s - (_waited_s(thread) - waited_s)))


def _waited_s(thread: Path) -> float:
    """Return how long a thread was ready to run and had no processor; 0 where the system does not tell."""
    try:
        return int(thread.read_text().split()[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0
