"""One rank of a model over several: its place, its group, and what it exchanges in a step.

Owns the group and its order of exchanges, and forms a new group when a rank was lost. Knows no scheduler: rank 0 tells
each step, and every rank takes part in it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import GroupLostError
from thermocline.messages import LayerIndex
from thermocline.parallel.exchange import LayerExchange, RankParts, RankRole
from thermocline.parallel.exchange_jobs import ExchangeFigures, ExchangeJobs
from thermocline.parallel.parts import Mixing, nobodys_chunk, part_of
from thermocline.parallel.replica_rows import ReplicaRows
from thermocline.parallel.step_header import StepHeader, decode_header, encode_header
from thermocline.parallel.takeover import owned_counts, taken_over, targets
from thermocline.parallel.turns import ExchangeKind, LayerTurns, RoundTurns, StepTurns
from thermocline.parallel.workspace import Arena, Dividing, Traffic, arena_sizes
from thermocline.remote.payload import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from thermocline.kernels.dense_contract import Contributions, LayerCache
    from thermocline.messages import (
        Chunk,
        ChunkId,
        ExpertDispatch,
        FloatArray,
        LayerWork,
    )
    from thermocline.parallel.expert_map import ExpertMap
    from thermocline.parallel.group import Group
    from thermocline.parallel.mesh import Mesh
    from thermocline.parallel.parts import ChunkPart
    from thermocline.parallel.rendezvous import Rendezvous

_CLOCK_READINGS: Final = 9
MAX_ROUNDS: Final = 2
"""Chunks of a replica in one step: one's tokens travel while the other computes."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What all ranks agree on. kind: who dispatches; max_tokens: of a chunk."""

    mesh: Mesh
    experts: ExpertMap
    kind: str
    max_tokens: int
    num_experts_used: int
    reason: str = ""
    """Why the experts are where they are, for the user."""
    mixed_row_bytes: int = 0
    """Most bytes of a row that ranks of one replica give each other in a layer."""

    def may_divide(self, mesh: Mesh) -> bool:
        """Whether ranks of a replica ever divide a chunk's rows; `naive` is what dividing is compared with."""
        return mesh.width > 1 and self.kind != "naive"

    def traffic(self, mesh: Mesh, num_owned: int, hidden: int, item_bytes: int) -> Traffic:
        """Return what can arrive at a rank of `mesh` in one layer."""
        dispatchers, tokens = len(mesh.live_replicas), self.max_tokens
        if self.kind == "naive":
            dispatchers = mesh.size
        elif self.kind == "sequence":
            # Each rank of a replica sends a part, rounded up; the narrowest replica has the largest parts.
            narrowest = min(len(mesh.replicas[n]) for n in mesh.live_replicas)
            dispatchers, tokens = mesh.size, -(-tokens // narrowest)
        divided = None
        if self.may_divide(mesh):
            divided = Dividing(mesh.size, mesh.width, self.max_tokens, self.mixed_row_bytes)
        return Traffic(
            dispatchers,
            tokens,
            self.num_experts_used,
            num_owned,
            hidden,
            item_bytes,
            mesh.size,
            MAX_ROUNDS,
            divided,
        )


class RankMember:
    """This process as one of the ranks. `join` first; `close` at the end."""

    def __init__(
        self,
        rank: int,
        plan: MeshPlan,
        parts: RankParts,
        connect: Callable[[int, int, int], Group],
        rendezvous: Rendezvous,
    ) -> None:
        """connect: returns the group of an epoch, this rank's place and how many there are. Raises GroupLostError."""
        self.rank = rank
        self.mesh = plan.mesh
        self.figures = ExchangeFigures()
        self._plan, self._parts = plan, parts
        self._connect, self._rendezvous = connect, rendezvous
        self._experts = plan.experts
        self._group: Group | None = None
        self._role: RankRole | None = None
        self._exchanges: tuple[LayerExchange, ...] = ()
        self._rows: tuple[ReplicaRows, ...] = ()
        self._jobs = ExchangeJobs(parts.thread, parts.recorder, self.figures)
        routed = set(parts.catalog.routed_layers)
        self._layers = tuple(
            LayerTurns(kind is not Mixing.NOTHING, layer in routed)
            for layer, kind in enumerate(parts.mixing)
        )
        self._divided_rounds: frozenset[int] = frozenset()
        self._arenas: tuple[Arena, ...] = ()
        self._epoch = 0
        self._next_turn = 0
        self._turns: StepTurns | None = None
        self._round_of: dict[int, int] = {}
        self._alone: frozenset[int] = frozenset()
        self.all_hold_the_file = False
        """Whether the memory of every rank has room for the whole file."""
        self._block_bytes: tuple[int, ...] = ()
        self._traffic: Traffic | None = None
        self.clock_offset_ns = 0
        """How far this rank's clock is ahead of rank 0's, to a fraction of a millisecond."""
        self.total_regroups = 0
        """Groups that were lost, and formed anew."""

    def __repr__(self) -> str:
        return f"RankMember({self.rank} of {self.mesh.ranks}, group {self._epoch})"

    @property
    def replica(self) -> int:
        """The replica that this rank is in."""
        return self.mesh.replica_of(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank gives its replica's results to rank 0."""
        return self.mesh.replicas[self.replica][0] == self.rank

    @property
    def may_divide(self) -> bool:
        """Whether ranks of a replica may divide a chunk's rows."""
        return self._plan.may_divide(self.mesh)

    @property
    def experts(self) -> ExpertMap:
        """Which ranks own which experts now."""
        return self._experts

    @property
    def way(self) -> str:
        """By what the present group exchanges, in words."""
        return self._the_group.way

    @property
    def map_reason(self) -> str:
        """Which experts each rank owned at the start, in words."""
        return self._plan.reason

    @property
    def owned_mask(self) -> NDArray[np.bool_]:
        """Which experts this rank owns: bool [layers, experts]."""
        mask: NDArray[np.bool_] = (self._experts.owner == self.mesh.place(self.rank)).any(axis=2)
        return mask

    @property
    def on_device(self) -> str:
        """How many of this rank's experts a device computes, in words; "" without one."""
        experts = self._parts.experts
        return f"{experts.num_on_device} on {experts.device_name}" if experts.num_on_device else ""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the arenas of the present group."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that was taken of each buffer of the first round."""
        return self._arenas[0].peak_bytes if self._arenas else {}

    def join(self, facts: Mapping[str, str], patience_s: float, *, holds_file: bool) -> None:
        """Wait for all ranks and form the first group; blocks. Raises MeshError.

        holds_file: whether this rank's memory has room for the whole file.
        """
        # Before others wait for this rank. Those that it takes over from a lost one it computes on its CPU.
        self._parts.experts.hold(self.owned_mask)
        self._rendezvous.first(self.mesh.size, facts, patience_s)
        self._form()
        self.clock_offset_ns = self._measure_clock()
        group = self._the_group
        held = group.exchange_sizes(np.full(group.size, holds_file, np.int64))
        self.all_hold_the_file = bool(held.all())

    async def regroup(self) -> tuple[int, ...]:
        """Form a group of the ranks that are left; return those that were lost. Raises MeshEndedError."""
        self._parts.thread.fail(GroupLostError("a rank was lost: its group is given up"))
        return await asyncio.to_thread(self._regroup)

    def computes_alone(self, chunk: ChunkId) -> bool:
        """Whether this rank computes every expert of a chunk. From any thread."""
        return chunk in self._alone

    def own_part(self, number: int, chunk: Chunk) -> Chunk:
        """Return what this rank computes of its replica's chunk of a round: all of it, or its rows."""
        if number not in self._divided_rounds:
            return chunk
        ranks = self.mesh.replicas[self.replica]
        return part_of(chunk, len(ranks), ranks.index(self.rank))

    def mixing(self, layer: LayerIndex) -> Mixing:
        """Return what ranks that divide a chunk give each other in a layer. From any thread."""
        return self._parts.mixing[layer]

    async def share_cache(self, part: ChunkPart, layer: LayerIndex, cache: LayerCache) -> None:
        """Have the keys and values of all rows of a chunk in a layer's cache, of which this rank's are. Raises MeshError."""
        number, turns = self._round_of[part.id], self._the_turns
        await self._rows[number].share_cache(
            turns.of(layer, ExchangeKind.MIX, number),
            part,
            layer,
            cache,
            window=self.mixing(layer) is Mixing.WINDOW_CACHE,
            is_only=turns.num_rounds == 1,
        )

    async def gather(self, part: ChunkPart, layer: LayerIndex, x: FloatArray) -> FloatArray:
        """Return all rows before a layer, float32 [T of the whole chunk, D]. x: this rank's. Raises MeshError."""
        number, turns = self._round_of[part.id], self._the_turns
        turn = turns.of(layer, ExchangeKind.MIX, number)
        is_only = turns.num_rounds == 1
        return await self._rows[number].gather(turn, part, layer, x, is_only=is_only)

    def give_up(self, why: str) -> None:
        """Let every exchange that waits fail: this rank can not take part in the step."""
        self._parts.thread.fail(GroupLostError(why))

    async def tell(self, header: StepHeader) -> None:
        """Give a header to all ranks; rank 0 alone. Raises GroupLostError."""
        data = encode_header(header)
        await self._at_next(partial(self._the_group.broadcast, data))
        self._begin(header)

    async def listen(self) -> StepHeader:
        """Return the next header from rank 0. Raises GroupLostError, also when rank 0 says nothing for too long."""
        data = await self._at_next(partial(self._the_group.broadcast, None))
        header = decode_header(data, self.replica)
        self._begin(header)
        return header

    async def layer(
        self, layer: LayerIndex, work: LayerWork, dispatch: ExpertDispatch
    ) -> Contributions | FloatArray:
        """Compute a layer of this rank's chunk with all ranks; see `LayerExchange.run`. Raises MeshError."""
        number = self._round_of[work.chunk.id]
        turns = self._the_turns
        found = await self._exchanges[number].run(
            turns, number, work.chunk, layer, (work, dispatch), self._block_bytes[number]
        )
        assert found is not None, "tokens that were given have outputs"
        return found

    async def idle_round(self, number: int, chunk: Chunk) -> None:
        """Compute what others need in a round for which this rank has no tokens. chunk: stands for them in the trace."""
        for layer in self._parts.catalog.routed_layers:
            await self._exchanges[number].run(
                self._the_turns, number, chunk, layer, None, self._block_bytes[number]
            )

    async def results(self, mine: bytes, expected: Sequence[int]) -> tuple[NDArray[np.uint8], ...]:
        """End a step: others give rank 0 their results. mine: on rank 0 nothing. expected: on rank 0 the bytes of each place.

        Returns them on rank 0, by place. Nothing happens where nobody has any.
        """
        group = self._the_group
        if not self._the_turns.has_results:
            return (np.empty(0, np.uint8),) * group.size
        sent, back = [0] * group.size, list(expected) or [0] * group.size
        sent[0] = len(mine)
        send = np.frombuffer(mine, np.uint8)
        received = np.empty(sum(back), np.uint8)
        job = partial(group.exchange, send.copy(), sent, received, back)
        await asyncio.wrap_future(self._parts.thread.submit(self._the_turns.results, job))
        return tuple(np.split(received, np.cumsum(back)[:-1]))

    def close(self) -> None:
        """Leave the group; others lose this rank unless they leave too."""
        self._parts.thread.close()
        if self._group is not None:
            self._group.close()
        self._rendezvous.close()

    @property
    def _the_group(self) -> Group:
        assert self._group is not None, "join first"
        return self._group

    @property
    def _the_turns(self) -> StepTurns:
        assert self._turns is not None, "no step has begun"
        return self._turns

    async def _at_next(self, job: partial[bytes]) -> bytes:
        turn, self._next_turn = self._next_turn, self._next_turn + 1
        return await asyncio.wrap_future(self._parts.thread.submit(turn, job))

    def _begin(self, header: StepHeader) -> None:
        if not header.rounds:
            return
        assert self._role is not None, "join first"
        # A replica of one rank has nothing to share, but takes part where another one has.
        rounds = [
            RoundTurns(any(parts), self._shares and has_whole)
            for parts, has_whole in zip(header.divided, header.has_whole, strict=True)
        ]
        layers = () if header.is_alone else self._layers
        self._turns = StepTurns(self._next_turn, layers, rounds, has_results=header.has_results)
        self._next_turn = self._turns.end
        self._divided_rounds = frozenset(
            number for number, parts in enumerate(header.divided) if parts[self.replica]
        )
        assert self._traffic is not None, "join first"
        self._block_bytes = tuple(map(self._traffic.block_bytes, header.most_tokens))
        self._round_of = {
            chunk.id: number
            for number, chunks in enumerate(header.rounds)
            if (chunk := chunks[self.replica]) is not None
        }
        self._alone = frozenset(self._round_of if header.is_alone else ())
        for number, about in enumerate(rounds):
            if about.divides and number not in self._divided_rounds:
                self._give_nothing(number, header)

    def _give_nothing(self, number: int, header: StepHeader) -> None:
        """Take part in what ranks of other replicas give each other in a round, layer by layer as their turns come."""
        chunk = header.rounds[number][self.replica] or nobodys_chunk(is_prompt=True)
        for layer, about in enumerate(self._layers):
            if about.mixes:
                turn = self._the_turns.of(layer, ExchangeKind.MIX, number)
                self._rows[number].give_nothing(turn, chunk, LayerIndex(layer))

    def _measure_clock(self) -> int:
        """Compare clocks right after exchanges, which all ranks leave at about the same time."""
        group, offsets = self._the_group, []
        for _ in range(_CLOCK_READINGS):
            group.exchange_sizes(np.zeros(group.size, np.int64))
            now_ns = time.perf_counter_ns()
            theirs = group.exchange_sizes(np.full(group.size, now_ns, np.int64))
            offsets.append(now_ns - int(theirs[0]))
        return sorted(offsets)[len(offsets) // 2]

    @property
    def _shares(self) -> bool:
        return self.mesh.width > 1 and self._plan.kind != "naive"

    def _regroup(self) -> tuple[int, ...]:
        """Form groups until one stands."""
        before = self.mesh.ranks
        if self._group is not None:
            self._group.close()
        while True:
            self._epoch += 1
            self.total_regroups += 1
            left = self._rendezvous.again(self._epoch, self.mesh.ranks)
            places = [self.mesh.place(rank) for rank in left]
            self._experts = taken_over(self._experts, places)
            self.mesh = self.mesh.without(set(self.mesh.ranks) - set(left))
            try:
                self._form()
            except GroupLostError:
                continue
            return tuple(rank for rank in before if rank not in left)

    def _form(self) -> None:
        mesh, plan, parts = self.mesh, self._plan, self._parts
        place = mesh.place(self.rank)
        self._group = group = self._connect(self._epoch, place, mesh.size)
        peers = mesh.peers(self.rank)
        self._role = RankRole(group, targets(self._experts, place), peers, plan.kind)
        num_owned = int(owned_counts(self._experts, place).max(initial=0))
        traffic = plan.traffic(mesh, num_owned, parts.hidden, ITEM_BYTES[parts.payload])
        # The largest share: blocks have one length for all ranks.
        most = max(int(owned_counts(self._experts, at).max()) for at in range(mesh.size))
        self._traffic = replace(traffic, num_owned=most)
        self._arenas = tuple(
            _arena(traffic, self._experts.owner.shape[1]) for _ in range(MAX_ROUNDS)
        )
        self._exchanges = tuple(
            LayerExchange(parts, self._role, arena, self._jobs, self.figures)
            for arena in self._arenas
        )
        self._rows = tuple(
            ReplicaRows(self._jobs, self.figures, group, peers, arena) for arena in self._arenas
        )
        self._next_turn = 0
        parts.thread.restart()


def _arena(traffic: Traffic, num_experts: int) -> Arena:
    arena = Arena()
    for name, nbytes in arena_sizes(traffic, num_experts).items():
        arena.reserve(name, nbytes)
    arena.lock()
    return arena
