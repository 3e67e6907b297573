"""Measures how late the server's event loop comes to what is due. Knows nothing of what makes it late."""

from __future__ import annotations

import asyncio
from typing import Final

from thermocline.server.exposition import Histogram

_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
# Twenty looks a second cost nothing, and make a p99 of a minute's.
_LOOK_EVERY_S: Final = 0.05


class LoopLag:
    """How late the loop was, as a histogram of seconds."""

    def __init__(self) -> None:
        self.histogram = Histogram(_BOUNDS_S)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
            self.histogram.observe(max(0.0, loop.time() - due_s))
