"""Measures by how much the server's event loop is late. Does not know why."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from thermocline.server.metrics.exposition import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
# Twenty measurements a second cost next to nothing, and suffice for a p99 over a minute.
_LOOK_EVERY_S: Final = 0.05


class LoopLag:
    """lag: how late the loop was, in seconds; stall: the part in which it did not wait for a processor.

    Stall is caused by the server itself; lag includes the load of other programs. busy: the part of it in which the
    loop's thread computed. The rest of a stall is waiting for the interpreter, whose holder may wait for a processor.
    """

    def __init__(self) -> None:
        self.lag = Histogram(_BOUNDS_S)
        self.stall = Histogram(_BOUNDS_S)
        self.busy = Histogram(_BOUNDS_S)

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        with _waiting_time() as waited_s:
            before_s, computed_s = waited_s(), time.thread_time()
            while True:
                due_s = loop.time() + _LOOK_EVERY_S
                await asyncio.sleep(_LOOK_EVERY_S)
                lag_s = max(0.0, loop.time() - due_s)
                now_s, now_computed_s = waited_s(), time.thread_time()
                self.lag.observe(lag_s)
                self.stall.observe(max(0.0, lag_s - (now_s - before_s)))
                self.busy.observe(min(lag_s, now_computed_s - computed_s))
                before_s, computed_s = now_s, now_computed_s


@contextmanager
def _waiting_time() -> Iterator[Callable[[], float]]:
    """Yield a function that returns for how many seconds this thread was ready to run and had no processor.

    It returns 0 where the system does not say. It makes one system call, because each releases the interpreter
    lock and then waits for it.
    """
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(file, 128, 0).split()[1]) * 1e-9
    finally:
        os.close(file)
