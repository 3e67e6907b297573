"""Calls of a worker, and their answers: plain data. Knows no connection."""

from __future__ import annotations

import time
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from thermocline.remote.receiving import Way
from thermocline.remote.requests import INLINE
from thermocline.workers.completion import ReceivableFuture

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from thermocline.errors import RemoteError
    from thermocline.messages import FloatArray
    from thermocline.remote.client import WorkerClient
    from thermocline.remote.receiving import WayChoice
    from thermocline.remote.requests import ExpertRequest


class ExpertAnswer(NamedTuple):
    """A worker's outputs, float32 [pairs, hidden], and times in nanoseconds.

    begin_ns and end_ns are by the worker's clock, which on one machine is ours; the others are by ours.
    """

    values: FloatArray
    given_ns: int
    sent_ns: int
    begin_ns: int
    end_ns: int
    came_ns: int
    taken_ns: int


class AnswerFuture(ReceivableFuture[ExpertAnswer]):
    """An answer to come, which a thread with nothing else to do may receive itself."""

    def __init__(self, client: WorkerClient, ways: WayChoice) -> None:
        super().__init__()
        self._client, self._ways = client, ways
        self._way: Way | None = None  # None where it had come before anybody waited

    def receive(self, is_wanted: Callable[[], bool]) -> None:
        """See `WorkerClient.receive`; does nothing where being woken by the client's thread is sooner."""
        if not self.done():
            self._way = self._ways.choose()
            if self._way is not Way.LEAVE:
                self._client.receive(self, is_wanted, spins=self._way is Way.SPIN)

    def count_wait(self, answer: ExpertAnswer) -> None:
        """Take in that the thread which waited for this answer goes on now. One thread at a time may, as with `receive`."""
        if self._way is not None:
            waited_ns = time.perf_counter_ns() - answer.sent_ns - (answer.end_ns - answer.begin_ns)
            self._ways.add(self._way, waited_ns * 1e-9)


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Counters of one worker since its client was started."""

    worker: str
    state: str
    """"ready", "late" (it gets nothing until it answers), "connecting" or "closed"."""
    kernels: str
    """What computes there; empty while it is unknown."""
    transport: str
    total_calls: int
    total_sent_bytes: int
    """Through socket and shared memory together."""
    total_received_bytes: int
    total_wait_ns: int
    """From sending to answer, summed over calls."""
    total_failures: int
    total_late: int
    """Calls given up because their answer was later than usual."""
    total_connections: int
    current_in_flight: int
    current_queued: int
    last_error: str
    link_bytes_per_s: float
    """Of late, by calls that had the link to themselves; 0 while it is unknown."""


@dataclass(slots=True)
class Call:
    """A request that was not answered yet."""

    number: int
    request: ExpertRequest
    future: Future[ExpertAnswer]
    deadline_s: float
    given_ns: int
    sent_ns: int = 0
    sent_bytes: int = 0
    slot: int = INLINE
    """Its slot in shared memory, or INLINE."""
    is_alone: bool = False
    """Whether nothing else was in flight when it was sent."""
    is_given_up: bool = False
    """Whether its answer, which was late, is dropped when it comes."""

    def end(self, result: ExpertAnswer | RemoteError) -> None:
        """Give the caller its answer or error, unless it has cancelled the call."""
        with suppress(InvalidStateError):
            if isinstance(result, ExpertAnswer):
                self.future.set_result(result)
            else:
                self.future.set_exception(result)
