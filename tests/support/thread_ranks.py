"""Ranks as threads of one process: a store, and a group whose exchanges meet in memory. For tests without torch.

A rank can be killed at any of its exchanges: then it says nothing any more, and whoever waits for it sees that.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.engine import mesh_builder
from thermocline.engine.follower import follow
from thermocline.errors import GroupLostError
from thermocline.parallel.group import LoneGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from thermocline.config import EngineConfig


class ThreadStore:
    """The part of torch's Store that ranks use."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._check()
        self._world.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        self._check()
        return self._world.values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self._check()
        return all(key in self._world.values for key in keys)

    def _check(self) -> None:
        if self._rank in self._world.dead or 0 in self._world.dead:
            raise RuntimeError("the store is gone")


class ThreadWorld:
    """What the ranks of one test share. deaths: by rank, before which of its exchanges it is killed."""

    def __init__(self, timeout_s: float, deaths: dict[int, int] | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.dead: set[int] = set()
        self.deaths = dict(deaths or {})
        self.timeout_s = timeout_s
        self.log: list[str] = []
        self._lock = threading.Lock()
        self._hubs: dict[tuple[int, int], Hub] = {}

    def store(self, rank: int) -> ThreadStore:
        """Return a rank's store."""
        return ThreadStore(self, rank)

    def connector(self, rank: int):
        """Return what connects a rank to the group of an epoch."""

        def connect(epoch: int, place: int, size: int):
            if size == 1:
                return LoneGroup()
            with self._lock:
                hub = self._hubs.setdefault((epoch, size), Hub(size))
            return ThreadGroup(self, hub, rank, place)

        return connect


class Hub:
    """Where the ranks of one group meet: what each gave in its n-th exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._given: dict[int, dict[int, Any]] = {}
        self._is_broken = False

    def swap(self, number: int, place: int, given: Any, timeout_s: float) -> list[Any]:
        """Return what all gave in their exchange of this number, once they have. Raises GroupLostError."""
        with self._changed:
            mine = self._given.setdefault(number, {})
            mine[place] = given
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(mine) == self.size or self._is_broken, timeout_s)
            if len(mine) < self.size:
                self._is_broken = True
                self._changed.notify_all()
                raise GroupLostError("a rank was lost")
            self._given.pop(number - 1, None)
            return [mine[each] for each in range(self.size)]

    def leave(self) -> None:
        """Let exchanges fail for which somebody is missing."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()


class ThreadGroup:
    """A `Group` whose ranks are threads."""

    def __init__(self, world: ThreadWorld, hub: Hub, rank: int, place: int) -> None:
        self.place, self.size, self.way = place, hub.size, "in one process"
        self._world, self._hub, self._rank = world, hub, rank
        self._number = 0

    def exchange_sizes(self, sizes: np.ndarray) -> np.ndarray:
        """See `Group`."""
        return np.array([given[self.place] for given in self._swap(sizes.copy())], np.int64)

    def exchange(
        self, send: np.ndarray, sent, receive: np.ndarray, received, *, is_small: bool = False
    ) -> None:
        """See `Group`; checks that both sides agree on the lengths."""
        assert sum(sent) == len(send), "lengths do not add up"
        assert sum(received) == len(receive), "lengths do not add up"
        ends = np.cumsum(sent)
        mine = [send[end - count : end].copy() for end, count in zip(ends, sent, strict=True)]
        start = 0
        for given, count in zip(self._swap(mine), received, strict=True):
            piece = given[self.place]
            assert len(piece) == count, "ranks do not agree on a length"
            receive[start : start + count] = piece
            start += count

    def broadcast(self, data: bytes | None) -> bytes:
        """See `Group`."""
        return self._swap(data)[0]

    def close(self) -> None:
        """See `Group`."""
        self._hub.leave()

    def _swap(self, given: Any) -> list[Any]:
        world = self._world
        left = world.deaths.get(self._rank)
        if left == 0:
            world.dead.add(self._rank)
            self._hub.leave()
            raise GroupLostError("killed")
        if left is not None:
            world.deaths[self._rank] = left - 1
        self._number += 1
        return self._hub.swap(self._number, self.place, given, world.timeout_s)


@contextmanager
def followed(
    world: ThreadWorld, path: object, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineConfig]:
    """Run the ranks behind rank 0 in threads while the block opens an engine with the config that it gets.

    At the end each has followed to the end, or was killed; what else one raised is raised here.
    """
    here = threading.local()
    monkeypatch.setattr(mesh_builder, "open_store", lambda _: world.store(here.rank))
    monkeypatch.setattr(mesh_builder, "connector", lambda store, *_: world.connector(here.rank))
    original = mesh_builder.open_member

    def open_member(context, *rest):
        here.rank = context.config.parallel.rank
        return original(context, *rest)

    monkeypatch.setattr("thermocline.engine.expert_stages.open_member", open_member)

    def run(rank: int) -> None:
        mine = replace(config, parallel=replace(config.parallel, rank=rank))
        try:
            follow(path, mine)
        except Exception as error:
            if rank not in world.dead and 0 not in world.dead:
                raise
            world.log.append(f"{rank}: {error}")

    num_ranks = config.parallel.num_ranks
    with ThreadPoolExecutor(max(num_ranks - 1, 1), "thermocline rank") as pool:
        runs = [pool.submit(run, rank) for rank in range(1, num_ranks)]
        yield replace(config, parallel=replace(config.parallel, rank=0))
        for each in runs:
            each.result(60)
