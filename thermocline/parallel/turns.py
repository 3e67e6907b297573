"""The order of a step's exchanges, the same on every rank, and the thread that makes most of them. Knows no bytes.

Two rounds take turns layer by layer: while one's tokens travel, the other computes. An exchange runs when its turn comes,
however early its rank has handed it in, so every rank makes the same ones in the same order.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from thermocline.errors import GroupLostError, MeshError
from thermocline.workers.completion import HeldFuture, wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")


class ExchangeKind(IntEnum):
    """The exchanges of a layer, in order."""

    MIX = 0
    """Ranks that divide a chunk give each other what their rows see."""
    ROWS = 1
    ANSWERS = 2
    SHARE = 3
    """Sums of rows that one rank sent, to the others of its replica."""


class LayerTurns(NamedTuple):
    """mixes: whether its rows see others. routes: whether it has routed experts."""

    mixes: bool
    routes: bool


class RoundTurns(NamedTuple):
    """divides: whether some replica's chunk is divided. shares: whether sums of some chunk go to other ranks."""

    divides: bool
    shares: bool


class StepTurns:
    """Numbers of one step's exchanges, the same on every rank."""

    def __init__(
        self,
        first: int,
        layers: Sequence[LayerTurns],
        rounds: Sequence[RoundTurns],
        *,
        has_results: bool = True,
    ) -> None:
        """first: of the step. layers: by layer. has_results: whether others have results for rank 0."""
        self.rounds, self.has_results = tuple(rounds), has_results
        self._turns: dict[tuple[int, ExchangeKind, int], int] = {}
        for layer, about in enumerate(layers):
            for exchange in ExchangeKind:
                for index, each in enumerate(self.rounds):
                    if _takes_place(exchange, about, each):
                        self._turns[layer, exchange, index] = first + len(self._turns)
        self.results = first + len(self._turns)
        """When the results go to rank 0, if there are any: the last of the step."""

    def __repr__(self) -> str:
        return f"StepTurns({len(self._turns)} of {len(self.rounds)} rounds, up to {self.end})"

    @property
    def num_rounds(self) -> int:
        """Chunks of a replica in the step, at most."""
        return len(self.rounds)

    def of(self, layer: int, exchange: ExchangeKind, round_index: int) -> int:
        """Return when an exchange of a layer is."""
        return self._turns[layer, exchange, round_index]

    @property
    def end(self) -> int:
        """The first turn behind the step."""
        return self.results + self.has_results


def _takes_place(exchange: ExchangeKind, layer: LayerTurns, each: RoundTurns) -> bool:
    match exchange:
        case ExchangeKind.MIX:
            return layer.mixes and each.divides
        case ExchangeKind.SHARE:
            return layer.routes and each.shares
        case _:
            return layer.routes


class TurnThread:
    """Runs jobs by their turns, one at a time, most of them on a thread of its own. Any thread may submit; `close` it."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._jobs: dict[int, tuple[Callable[[], Any], HeldFuture[Any]]] = {}
        self._next = 0
        self._error: MeshError | None = None
        self._is_closed = self._is_busy = False
        self._thread = threading.Thread(target=self._work, name="lane exchange", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"TurnThread(turn {self._next}, {len(self._jobs)} waiting)"

    def submit(self, turn: int, job: Callable[[], R]) -> HeldFuture[R]:
        """Have `job` run at its turn; return its result to come, which is GroupLostError once one job has failed."""
        future: HeldFuture[R] = HeldFuture()
        with self._lock:
            error = self._error
            if error is None:
                assert turn >= self._next, "a turn is over"
                assert turn not in self._jobs, f"turn {turn} was given twice"
                self._jobs[turn] = job, future
                if turn == self._next:
                    self._lock.notify_all()
        if error is not None:
            future.set_exception(_copy(error))
        return future

    def run(self, turn: int, job: Callable[[], R]) -> R:
        """Run `job` at its turn and return its result: on the calling thread where the turn is now. Blocks.

        Waking the exchange thread, and being woken, take longer than a small exchange. Raises what the job raises.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._is_busy)
            is_now = self._error is None and turn == self._next and turn not in self._jobs
            if is_now:
                self._next += 1
                self._is_busy = True
        if not is_now:
            future = self.submit(turn, job)
            wait_for_all((future,))
            return future.result()
        try:
            return job()
        except MeshError as error:
            self.fail(error)
            raise
        except BaseException as error:
            self.fail(GroupLostError(f"an exchange failed here: {error!r}"))
            raise
        finally:
            with self._lock:
                self._is_busy = False
                self._lock.notify_all()

    def restart(self) -> None:
        """Begin again with turn 0, after a failure or at the start. Blocks until the present job has ended."""
        with self._lock:
            self._lock.wait_for(lambda: not self._is_busy)
            assert not self._jobs, "jobs of the old order are left"
            self._next, self._error = 0, None

    def fail(self, error: MeshError) -> None:
        """Let every job that waits or comes fail, until `restart`."""
        with self._lock:
            self._error = self._error or error
            jobs, self._jobs = self._jobs, {}
        for _, future in jobs.values():
            future.set_exception(_copy(error))

    def close(self) -> None:
        """End the thread once its present job ends."""
        self.fail(MeshError("the engine is closed: open a new one"))
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                while (self._next not in self._jobs or self._is_busy) and not self._is_closed:
                    self._lock.wait()
                if self._is_closed:
                    return
                job, future = self._jobs.pop(self._next)
                self._next += 1
                self._is_busy = True
            try:
                result = job()
            except MeshError as error:
                future.set_exception(error)
                self.fail(error)
            except BaseException as error:  # noqa: BLE001 - handed to who waits
                future.set_exception(error)
                self.fail(GroupLostError(f"an exchange failed here: {error!r}"))
            else:
                future.set_result(result)
            del job, future
            with self._lock:
                self._is_busy = False
                self._lock.notify_all()


def _copy(error: MeshError) -> MeshError:
    return type(error)(str(error))
