"""How ranks find each other: at the start, and again after one was lost. Over the store that torchrun has made.

Every rank writes that it is here; rank 0 waits for those that are alive and writes who goes on. A rank is alive while
its pulse changes, so one that was killed or stopped is not waited for. Knows no exchange.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from thermocline.errors import MeshEndedError, MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

R = TypeVar("R")

_PULSE_S: Final = 0.1
_LOOK_S: Final = 0.01
_RANK_0: Final = "rank 0 has ended, and the service with it: start all ranks again"


class KeyStore(Protocol):
    """The part of torch's Store that ranks use. Every method raises RuntimeError when the store is gone."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        ...


def open_store(timeout_s: float) -> KeyStore:
    """Return the store of this run. Raises MeshError when it can not be reached in time, or there is no torch."""
    try:
        from torch.distributed import rendezvous  # type: ignore[attr-defined]

        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ImportError as error:
        raise MeshError(
            f"ranks need torch ({error}): install it, or start one process without torchrun"
        ) from error
    except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
        raise MeshError(
            f"the ranks' store can not be reached ({error}): start all ranks with torchrun"
        ) from error
    found: KeyStore = store
    return found


class Rendezvous:
    """One rank's view of who is there. `close` it, which ends its pulse."""

    def __init__(self, store: KeyStore, rank: int, timeout_s: float) -> None:
        """timeout_s: the deadline of an exchange, after half of which a rank without a pulse is lost."""
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._silence_s = max(timeout_s / 2, 0.5)
        self._end = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="thermocline pulse", daemon=True)
        self._pulse.start()

    def close(self) -> None:
        """End the pulse: others take this rank for lost."""
        self._end.set()
        self._pulse.join()

    def first(self, size: int, facts: Mapping[str, str], patience_s: float) -> None:
        """Wait for all ranks; see that they have the same facts. Raises MeshError naming who has others.

        patience_s: how long all ranks together may take to open the model.
        """
        if self._read("0/members") is not None:
            raise MeshEndedError(
                f"rank {self._rank} came when the others had begun: start all ranks together"
            )
        self._write(f"0/here/{self._rank}", json.dumps(dict(facts)))
        if self._rank == 0:
            text = self._first_members(size, patience_s)
            self._write("0/members", text)
        else:
            text = self._wait_members("0/members", patience_s)
        if text.startswith("!"):
            raise MeshError(text[1:])

    def tell(self, name: str, text: str) -> None:
        """Give all ranks a text, before they meet; rank 0 alone. Raises MeshEndedError."""
        self._write(f"0/told/{name}", text)

    def hear(self, name: str, patience_s: float) -> str:
        """Return what rank 0 tells under a name. Raises MeshEndedError when it has ended, or says nothing for so long."""
        return self._wait_members(f"0/told/{name}", patience_s)

    def again(self, epoch: int, members: Collection[int]) -> tuple[int, ...]:
        """Return the ranks that go on, after a loss. members: of the epoch before.

        Raises MeshEndedError where rank 0 has ended, or went on without this rank.
        """
        key = f"{epoch}/members"
        if self._read(key) is None:
            self._write(f"{epoch}/here/{self._rank}", "{}")
        if self._rank == 0:
            left = self._who_is_left(epoch, members)
            self._write(key, json.dumps(left))
        else:
            left = json.loads(self._wait_members(key, 4 * self._timeout_s + 5.0))
        if self._rank not in left:
            raise MeshEndedError(
                f"the others went on without rank {self._rank}, which was late (--rank-timeout): "
                "start all ranks again to have it back"
            )
        return tuple(left)

    def _first_members(self, size: int, patience_s: float) -> str:
        end_s = time.monotonic() + patience_s
        facts: dict[int, dict[str, str]] = {}
        while len(facts) < size:
            for rank in range(size):
                if rank not in facts and (text := self._read(f"0/here/{rank}")) is not None:
                    facts[rank] = json.loads(text)
            if time.monotonic() > end_s:
                missing = ", ".join(str(rank) for rank in range(size) if rank not in facts)
                return f"!rank {missing} did not open the model within {patience_s:.0f} s: see what it says"
            time.sleep(_LOOK_S)
        return _difference(facts) or json.dumps(list(range(size)))

    def _who_is_left(self, epoch: int, members: Collection[int]) -> list[int]:
        """Return the members that came, once every other one has been silent, or late, for long enough."""
        begin_s = time.monotonic()
        heard = {rank: (self._read(f"pulse/{rank}"), begin_s) for rank in members}
        waited = set(members) - {self._rank}
        here = {self._rank}
        while waited and time.monotonic() < begin_s + 2 * self._timeout_s + self._silence_s:
            for rank in sorted(waited):
                if self._read(f"{epoch}/here/{rank}") is not None:
                    here.add(rank)
                    waited.remove(rank)
                elif self._is_silent(rank, heard):
                    waited.remove(rank)
            time.sleep(_LOOK_S)
        return sorted(here)

    def _is_silent(self, rank: int, heard: dict[int, tuple[str | None, float]]) -> bool:
        pulse, at_s = heard.get(rank, (None, time.monotonic()))
        now, now_s = self._read(f"pulse/{rank}"), time.monotonic()
        if now != pulse or rank not in heard:
            heard[rank] = now, now_s
            return False
        return now_s > at_s + self._silence_s

    def _wait_members(self, key: str, patience_s: float) -> str:
        end_s, heard = time.monotonic() + patience_s, dict[int, tuple[str | None, float]]()
        has_begun = False
        while time.monotonic() < end_s:
            text = self._read(key)
            if text is not None:
                return text
            has_begun = has_begun or self._read("pulse/0") is not None
            if has_begun and self._is_silent(0, heard):
                raise MeshEndedError(_RANK_0)
            time.sleep(_LOOK_S)
        raise MeshEndedError(_RANK_0)

    def _beat(self) -> None:
        for number in range(1 << 62):
            try:
                self._write(f"pulse/{self._rank}", str(number))
            except MeshEndedError:
                return  # rank 0 has ended: whoever waits for it sees that
            if self._end.wait(_PULSE_S):
                return

    def _write(self, key: str, text: str) -> None:
        _stored(lambda: self._store.set(key, text))

    def _read(self, key: str) -> str | None:
        def read() -> str | None:
            return self._store.get(key).decode() if self._store.check([key]) else None

        return _stored(read)


def _stored(action: Callable[[], R]) -> R:
    try:
        return action()
    except RuntimeError as error:  # torch's errors of a lost connection, and timeouts
        raise MeshEndedError(_RANK_0) from error


def _difference(facts: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return what differs between rank 0 and another, None if nothing does."""
    mine = facts[0]
    for rank, theirs in sorted(facts.items()):
        for name in (*mine, *theirs):
            if mine.get(name) != theirs.get(name):
                return (
                    f"!rank {rank} has another {name} than rank 0 ({theirs.get(name)}, not {mine.get(name)}): "
                    "start all ranks with the same version, model file and flags"
                )
    return None
