"""Which ranks there are, and which of them form a replica. Pure: names of ranks, no process and no socket.

A rank keeps the number it was started with; its place is its index among the ranks that are left, which is its number
in the process group. A replica is the ranks that compute the same tokens; its first one is its leader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True)
class Mesh:
    """replicas: the ranks of each one, ascending; empty for a replica that was lost."""

    replicas: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in the order of their places."""
        return tuple(sorted(rank for replica in self.replicas for rank in replica))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.replicas))

    @property
    def width(self) -> int:
        """Ranks of the widest replica."""
        return max(map(len, self.replicas))

    @property
    def live_replicas(self) -> tuple[int, ...]:
        """The replicas that have a rank."""
        return tuple(number for number, ranks in enumerate(self.replicas) if ranks)

    def place(self, rank: int) -> int:
        """Return a rank's number in the process group."""
        return self.ranks.index(rank)

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank is in."""
        return next(number for number, ranks in enumerate(self.replicas) if rank in ranks)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the places of the ranks of a rank's replica, itself included, the leader first."""
        return tuple(map(self.place, self.replicas[self.replica_of(rank)]))

    def without(self, lost: Collection[int]) -> Mesh:
        """Return the mesh of the ranks that are left."""
        return Mesh(
            tuple(tuple(rank for rank in ranks if rank not in lost) for ranks in self.replicas)
        )


def make_mesh(world_size: int, dp: int | None, tp: int | None) -> Mesh:
    """Return the mesh of `world_size` ranks: ranks of a replica are neighbours. Raises ConfigError."""
    width = tp if tp is not None else 1 if dp is None else max(world_size // dp, 1)
    count = dp if dp is not None else max(world_size // width, 1)
    if count * width != world_size:
        raise ConfigError(
            f"--dp {count} times --tp {width} are {count * width} ranks, but torchrun started {world_size}: "
            "start as many, or change one of the two"
        )
    return Mesh(tuple(tuple(range(n * width, (n + 1) * width)) for n in range(count)))
