"""The end of a job on another thread, as whoever waits for it sees it: cheaper than a Future, and enough for lanes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

R = TypeVar("R")


class AnyFuture(Protocol):
    """A Completion, or a Future of asyncio or of another thread."""

    def done(self) -> bool:
        """Whether the job has ended."""
        ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` when it has; at once if it has already."""
        ...


class Completion(Generic[R]):
    """One job's result to come. One thread settles it; any may wait."""

    __slots__ = ("_callbacks", "_error", "_is_done", "_result")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []
        self._is_done = False

    def done(self) -> bool:
        """Whether the job has ended."""
        return self._is_done

    def result(self) -> R:
        """Return what the job returned, or raise what it raised; only once it has ended."""
        if self._error is not None:
            raise self._error
        return self._result

    def settle(self, result: Any, error: BaseException | None) -> None:  # noqa: ANN401 - an R, unless there is an error
        """End the job."""
        self._result: R = result
        self._error = error
        self._is_done = True
        self._call_back()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` once when the job has ended, on the thread that ends it, or at once."""
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    def _call_back(self) -> None:
        # Two threads may be here at once: what one takes from the list, the other does not find.
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback(self)


class HeldFuture(Future[R]):
    """What another chunk holds and gives back: to do so, that chunk may need the lane of whoever waits."""


class ReceivableFuture(Future[R]):
    """A result that whoever waits for it can fetch, sooner than another thread would wake it."""

    def receive(self, is_wanted: Callable[[], bool]) -> None:
        """Fetch the result on the calling thread while `is_wanted`; return when it is there, or after some time."""
        raise NotImplementedError


def wait_for_all(futures: Iterable[AnyFuture]) -> None:
    """Block until every one is done. None may need the calling thread."""
    for future in futures:
        if not future.done():
            ended = threading.Semaphore(0)
            future.add_done_callback(partial(_release, ended))
            ended.acquire()


def _release(ended: threading.Semaphore, future: object) -> None:
    ended.release()
