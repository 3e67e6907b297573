"""How an exchange is made: at its turn, with its time counted and drawn. Knows no bytes."""

from __future__ import annotations

import time
from asyncio import _get_running_loop as running_loop  # get_running_loop costs an exception here
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from thermocline.traces.lanes import Lane, Name
from thermocline.workers.lane import result_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.messages import Chunk, LayerIndex
    from thermocline.parallel.turns import TurnThread
    from thermocline.traces.recorder import Recorder

R = TypeVar("R")


@dataclass(slots=True)
class ExchangeFigures:
    """What one rank has exchanged so far. Written by its exchanges alone."""

    total_rows_sent: int = 0
    """Tokens sent to experts, to its own too: one for each rank that a token hits."""
    total_rows_received: int = 0
    total_sent_bytes: int = 0
    """To other ranks, with heads, ids and weights."""
    total_mixed_bytes: int = 0
    """Those of them that went to ranks of its own replica, of rows that are divided."""
    total_wait_ns: int = 0
    """Inside exchanges: moving bytes, and waiting for later ranks."""
    total_exchanges: int = 0
    peak_layer_rows: int = 0
    """Most tokens that arrived for one layer of one round, those from itself included."""


class ExchangeJobs:
    """Has exchanges made on one rank, and counts them."""

    def __init__(self, thread: TurnThread, recorder: Recorder, figures: ExchangeFigures) -> None:
        self.thread = thread
        self._recorder, self._figures = recorder, figures

    async def run(self, turn: int, job: Callable[[], R], *, is_only: bool) -> R:
        """Return the job's result: made by this thread where its lane has nothing else to do meanwhile.

        is_only: whether the step has no other round.
        """
        if is_only and running_loop() is None:
            return self.thread.run(turn, job)
        return await result_of(self.thread.submit(turn, job))

    def shown(
        self, job: Callable[[], R], chunk: Chunk, layer: LayerIndex, nbytes: int
    ) -> Callable[[], R]:
        """Return the job with its time counted and drawn. nbytes: what it gives to others."""
        figures, recorder = self._figures, self._recorder

        def run() -> R:
            start_ns = time.perf_counter_ns()
            result = job()
            end_ns = time.perf_counter_ns()
            figures.total_wait_ns += end_ns - start_ns
            figures.total_sent_bytes += nbytes
            figures.total_exchanges += 1
            if recorder.enabled:
                args = {"chunk": chunk.id, "layer": layer, "bytes": nbytes}
                recorder.span(Lane.EXCHANGE, Name.EXCHANGE, start_ns, end_ns, args)
            return result

        return run
