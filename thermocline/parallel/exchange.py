"""One layer's experts on all ranks: tokens to their experts' ranks, outputs back, and shared in the replica.

Every rank runs every layer of every round, also without tokens, since others may need its experts. Outputs come back one
by one and are added in slot order, so the split between ranks does not change a bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.errors import MeshError
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.dense_contract import Contributions
from thermocline.parallel.dispatch_plan import (
    LENGTH_AT,
    DispatchPlan,
    Rows,
    pack_part,
    part_bytes,
    plan_dispatch,
    unpack_part,
)
from thermocline.parallel.parts import ChunkPart
from thermocline.parallel.turns import ExchangeKind
from thermocline.parallel.workspace import HEAD_BYTES
from thermocline.remote.payload import ITEM_BYTES, pack_floats, unpack_floats
from thermocline.traces.lanes import Name
from thermocline.workers.lane import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.messages import (
        Chunk,
        ExpertDispatch,
        FloatArray,
        IntArray,
        LayerIndex,
        LayerWork,
    )
    from thermocline.parallel.exchange_jobs import ExchangeFigures, ExchangeJobs
    from thermocline.parallel.group import Group
    from thermocline.parallel.parts import Mixing
    from thermocline.parallel.rank_experts import RankExperts
    from thermocline.parallel.turns import StepTurns, TurnThread
    from thermocline.parallel.workspace import Arena
    from thermocline.remote.payload import PayloadType
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import JobLane

    Bytes = NDArray[np.uint8]

_OVERLAPPED_PAIRS: Final = 64
"""From so many pairs on, a rank computes its own while the others' tokens travel; below, one call for all is faster."""
_OVERLAPPED_ROWS: Final = 32
"""The same where ranks divide a chunk, by rows of each expert: others send as many there, and of fewer rows two calls would
take nearly twice as long as one, as each unpacks the experts."""
_MAX_SMALL_BYTES: Final = 1 << 19
"""To one rank. By sockets 256 KiB took 0.19 ms and 1 MiB 1.6, by gloo's collectives 0.3 and 0.8."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """What computes and exchanges on one rank."""

    catalog: ExpertCatalog
    kernels: Kernels
    experts: RankExperts
    lane: JobLane
    recorder: Recorder
    thread: TurnThread
    payload: PayloadType
    hidden: int
    """Width of what experts take."""
    num_experts_used: int
    """Outputs of one token."""
    mixing: tuple[Mixing, ...]
    """By layer, what ranks of one replica give each other."""


@dataclass(frozen=True, slots=True)
class RankRole:
    """What one rank is in the present group.

    target: int32 [layers, experts], where its tokens' experts are computed. peers: the places of its replica, the leader
    first. kind: who dispatches. group: with its place.
    """

    group: Group
    target: IntArray
    peers: tuple[int, ...]
    kind: str

    def tokens(self, num_tokens: int) -> range:
        """Return the rows of a chunk that this rank sends."""
        return self.tokens_of(self.peers.index(self.group.place), num_tokens)

    def tokens_of(self, peer: int, num_tokens: int) -> range:
        """Return the rows that a rank of the replica sends. peer: its index among them."""
        if self.kind == "sequence":
            each = -(-num_tokens // len(self.peers))
            return range(min(peer * each, num_tokens), min((peer + 1) * each, num_tokens))
        return range(num_tokens if peer == 0 or self.kind == "naive" else 0)


class _Received(NamedTuple):
    data: Bytes
    sizes: list[int]


class LayerExchange:
    """One round's exchanges: at most one layer is under way in it."""

    def __init__(
        self,
        parts: RankParts,
        role: RankRole,
        arena: Arena,
        jobs: ExchangeJobs,
        figures: ExchangeFigures,
    ) -> None:
        """arena: has buffers "send", "receive", "answer" and "returned", for this round alone."""
        self._parts, self._role, self._arena = parts, role, arena
        self._figures = figures
        self._jobs = jobs
        self._is_only = False  # whether the step has no other round
        self._is_small = False  # whether few bytes travel between any two ranks

    async def run(
        self,
        turns: StepTurns,
        round_index: int,
        chunk: Chunk,
        layer: LayerIndex,
        given: tuple[LayerWork, ExpertDispatch] | None,
        block_bytes: int = 0,
    ) -> Contributions | FloatArray | None:
        """Take part in a layer. given: this rank's tokens; None where its replica has none.

        block_bytes: what every rank sends every other one, the same for all ranks; 0 for lengths of their own.

        Returns its tokens' outputs, or where the replica shares, the layer's sum, float32 [T, D]. A rank sends all tokens of
        a part, and shares nothing: nobody else computes them.
        """
        self._is_only = turns.num_rounds == 1
        # No token has more bytes in its outputs than so often those of its block.
        self._is_small = 0 < self._parts.num_experts_used * block_bytes <= _MAX_SMALL_BYTES
        turn = partial(turns.of, layer, round_index=round_index)
        is_part = isinstance(chunk, ChunkPart)
        plan = self._plan(layer, given, is_part=is_part)
        mine, others = await self._rows(
            turn(exchange=ExchangeKind.ROWS), chunk, layer, given, plan, block_bytes=block_bytes
        )
        values = await self._answers(
            turn(exchange=ExchangeKind.ANSWERS), chunk, layer, plan, mine, others
        )
        found = None
        if given is not None:
            dispatch, pairs = given[1], _pairs(plan)
            found = Contributions(dispatch.rows[pairs], dispatch.slots[pairs], values)
        if not turns.rounds[round_index].shares:
            return found
        shared = None if is_part else given
        sums = await self._share(turn(exchange=ExchangeKind.SHARE), chunk, layer, shared, found)
        return found if is_part else sums

    def _plan(
        self,
        layer: LayerIndex,
        given: tuple[LayerWork, ExpertDispatch] | None,
        *,
        is_part: bool,
    ) -> DispatchPlan:
        role = self._role
        if given is None:
            return DispatchPlan({}, role.group.size)
        work, dispatch = given
        tokens = range(len(work.x)) if is_part else role.tokens(len(work.x))
        if not len(tokens):
            return DispatchPlan({}, role.group.size)
        every = None if len(tokens) == len(work.x) else tokens
        return plan_dispatch(dispatch, role.target[layer], role.group.size, every)

    async def _rows(
        self,
        turn: int,
        chunk: Chunk,
        layer: LayerIndex,
        given: tuple[LayerWork, ExpertDispatch] | None,
        plan: DispatchPlan,
        *,
        block_bytes: int,
    ) -> tuple[FloatArray | None, tuple[list[Rows | None], list[FloatArray]]]:
        """Send rows, and compute those that arrive. Returns outputs of the own part, and those for each rank."""
        parts, place = self._parts, self._role.group.place
        sizes = [
            0 if rank == place else part_bytes(plan.parts.get(rank), parts.hidden, parts.payload)
            for rank in range(plan.num_ranks)
        ]
        send, received_blocks = self._send_buffers(sum(sizes), block_bytes)
        own = None
        start = 0
        for rank, part in plan.parts.items():
            assert given is not None, "a plan has tokens"
            x, is_prompt = given[0].x, chunk.is_prompt
            if rank == place:
                at = part.tokens
                own_x = x if len(at) == len(x) else x[at]
                own = Rows(own_x, part.experts, part.counts, part.places, part.weights, is_prompt)
            else:
                start = rank * block_bytes if block_bytes else start
                end = start + sizes[rank]
                pack_part(part, x, parts.payload, send[start:end], is_prompt=is_prompt)
                start = end
        self._figures.total_rows_sent += int(plan.rows_to.sum())
        job = partial(self._exchange_rows, send, np.array(sizes, np.int64))
        if block_bytes:
            job = partial(self._exchange_blocks, send, received_blocks, sizes)
        shown = self._jobs.shown(job, chunk, layer, len(send))
        mine = None
        if own is not None and own.num_pairs >= _least_overlapped(chunk, own):
            coming = self._jobs.thread.submit(turn, shown)
            (mine,) = await self._compute(chunk, layer, [own])
            own = None
            received = await result_of(coming)
        else:
            received = await self._jobs.run(turn, shown, is_only=self._is_only)
        rows = self._unpacked(received, block_bytes)
        self._count(rows, plan)
        wanted = [*(each for each in rows if each is not None), *([] if own is None else [own])]
        outputs = await self._compute(chunk, layer, wanted)
        if own is not None:
            mine = outputs.pop()
        return mine, (rows, outputs)

    def _unpacked(self, received: _Received, block_bytes: int) -> list[Rows | None]:
        """Return what came of each rank, None where nothing did."""
        parts, start = self._parts, 0
        rows: list[Rows | None] = []
        for rank, size in enumerate(received.sizes):
            start = rank * block_bytes if block_bytes else start
            packed = received.data[start : start + size]
            rows.append(
                unpack_part(packed, parts.hidden, parts.catalog.num_experts) if size else None
            )
            start += size
        return rows

    def _count(self, rows: Sequence[Rows | None], plan: DispatchPlan) -> None:
        own = plan.parts.get(self._role.group.place)
        number = sum(len(each.x) for each in rows if each is not None)
        self._figures.total_rows_received += number
        number += 0 if own is None else len(own.tokens)
        self._figures.peak_layer_rows = max(self._figures.peak_layer_rows, number)

    async def _answers(
        self,
        turn: int,
        chunk: Chunk,
        layer: LayerIndex,
        plan: DispatchPlan,
        mine: FloatArray | None,
        others: tuple[list[Rows | None], list[FloatArray]],
    ) -> FloatArray:
        """Send outputs back, and return those of the own tokens in the plan's order: float32 [pairs, D]."""
        parts, place, (rows, outputs) = self._parts, self._role.group.place, others
        row_bytes = parts.hidden * ITEM_BYTES[parts.payload]
        sent = [0 if each is None else each.num_pairs * row_bytes for each in rows]
        back = [
            0 if rank == place or part is None else len(part.places) * row_bytes
            for rank, part in ((n, plan.parts.get(n)) for n in range(plan.num_ranks))
        ]
        answer = self._arena.take("answer", sum(sent), "outputs of a layer")
        start = 0
        for values in outputs:
            packed = np.ascontiguousarray(pack_floats(values, parts.payload))
            answer[start : start + packed.nbytes] = packed.view(np.uint8).reshape(-1)
            start += packed.nbytes
        returned = self._arena.take("returned", sum(back), "outputs of this rank's tokens")
        job = self._exchange(answer, sent, returned, back)
        await self._exchanged(turn, job, chunk, layer, sum(sent))
        found, start = [], 0
        for rank in sorted(plan.parts):
            if rank == place:
                assert mine is not None, "the own part was computed"
                found.append(mine)
                continue
            packed = returned[start : start + back[rank]].view(parts.payload.storage)
            found.append(unpack_floats(packed.reshape(-1, parts.hidden), parts.payload))
            start += back[rank]
        if not found:
            return np.empty((0, parts.hidden), np.float32)
        # A copy: the buffer is taken again for the next layer, and the sum may be made later.
        return np.concatenate(found)

    async def _share(
        self,
        turn: int,
        chunk: Chunk,
        layer: LayerIndex,
        given: tuple[LayerWork, ExpertDispatch] | None,
        found: Contributions | None,
    ) -> FloatArray | None:
        """Add up this rank's tokens, give the sums to its replica, and return those of all tokens."""
        role, parts, size = self._role, self._parts, self._role.group.size
        place = role.group.place
        if given is None:
            none = np.empty(0, np.uint8)
            job = self._exchange(none, [0] * size, none, [0] * size)
            await self._exchanged(turn, job, chunk, layer, 0)
            return None
        work, tokens = given[0], role.tokens(len(given[0].x))
        assert found is not None, "tokens that were given have outputs"
        residual = work.residual
        row_bytes = residual.shape[1] * residual.itemsize
        sums = np.empty((0, residual.shape[1]), np.float32)
        if len(tokens):
            mine = np.ascontiguousarray(residual[tokens.start : tokens.stop])
            own = Contributions(found.rows - np.int32(tokens.start), found.slots, found.values)
            num_slots = work.routing.expert_ids.shape[1]
            combine = partial(parts.kernels.dense.combine, mine, [own], num_slots)
            sums = await parts.lane.run(Name.COMBINE, combine, chunk, layer)
        peers = [rank for rank in role.peers if rank != place]
        sent = [sums.nbytes if rank in peers else 0 for rank in range(size)]
        back = [0] * size
        for peer, rank in enumerate(role.peers):
            back[rank] = len(role.tokens_of(peer, len(work.x))) * row_bytes if rank != place else 0
        send = np.tile(sums.view(np.uint8).reshape(-1), len(peers))
        received = np.empty(sum(back), np.uint8)
        job = self._exchange(send, sent, received, back)
        await self._exchanged(turn, job, chunk, layer, sum(sent))
        whole, start = [], 0
        for rank in role.peers:  # ascending places, so their rows are in order
            end = start + back[rank]
            flat = sums if rank == place else received[start:end].view(np.float32)
            whole.append(flat.reshape(-1, residual.shape[1]))
            start = end
        return np.concatenate(whole)

    def _exchange(
        self, send: Bytes, sent: Sequence[int], receive: Bytes, received: Sequence[int]
    ) -> Callable[[], None]:
        exchange = self._role.group.exchange
        return partial(exchange, send, sent, receive, received, is_small=self._is_small)

    async def _exchanged(
        self, turn: int, job: Callable[[], None], chunk: Chunk, layer: LayerIndex, nbytes: int
    ) -> None:
        shown = self._jobs.shown(job, chunk, layer, nbytes)
        await self._jobs.run(turn, shown, is_only=self._is_only)

    def _send_buffers(self, nbytes: int, block_bytes: int) -> tuple[Bytes, Bytes]:
        """Return what rows are packed into, and where blocks arrive, which is empty without blocks."""
        if not block_bytes:
            return self._arena.take("send", nbytes, "rows of a layer"), np.empty(0, np.uint8)
        size = self._role.group.size * block_bytes
        blocks = self._arena.take("blocks", 2 * size, "blocks of a layer")
        return blocks[:size], blocks[size:]

    def _exchange_blocks(self, send: Bytes, received: Bytes, sizes: list[int]) -> _Received:
        """Exchange a block with every rank; its first number says how much of it counts."""
        group = self._role.group
        block_bytes = len(send) // group.size
        lengths = [block_bytes] * group.size
        heads = send.reshape(group.size, block_bytes)[:, :HEAD_BYTES].view(np.uint32)
        heads[:, LENGTH_AT] = sizes
        group.exchange(send, lengths, received, lengths, is_small=True)
        coming = received.reshape(group.size, block_bytes)[:, :HEAD_BYTES].view(np.uint32)
        found = coming[:, LENGTH_AT].tolist()
        if max(found) > block_bytes:
            raise MeshError("a rank sends more than it says: start all ranks with the same version")
        return _Received(received, found)

    def _exchange_rows(self, send: Bytes, sizes: NDArray[np.int64]) -> _Received:
        group = self._role.group
        coming = group.exchange_sizes(sizes)
        total = int(coming.sum())
        if total < 0 or (coming < 0).any():
            raise MeshError("a rank sends less than nothing: start all ranks with the same version")
        receive = self._arena.take("receive", total, "rows that arrive")
        received = coming.tolist()
        group.exchange(send, sizes.tolist(), receive, received)
        return _Received(receive, received)

    async def _compute(
        self, chunk: Chunk, layer: LayerIndex, wanted: Sequence[Rows]
    ) -> list[FloatArray]:
        """Return the outputs of each, float32 [pairs, D], computed together where that changes no bit."""
        outputs: list[FloatArray | None] = [None] * len(wanted)
        for is_prompt in (False, True):
            chosen = [n for n, rows in enumerate(wanted) if rows.is_prompt is is_prompt]
            if not chosen:
                continue
            job = partial(self._outputs, layer, [wanted[n] for n in chosen], is_prompt=is_prompt)
            num_experts = sum(len(wanted[n].experts) for n in chosen)
            found = await self._parts.lane.run(Name.COLD, job, chunk, layer, experts=num_experts)
            for n, values in zip(chosen, found, strict=True):
                outputs[n] = values
        return [values for values in outputs if values is not None]

    def _outputs(
        self, layer: LayerIndex, wanted: Sequence[Rows], *, is_prompt: bool
    ) -> list[FloatArray]:
        stack = self._parts.catalog.stack(layer)
        experts = self._parts.experts
        if len(wanted) == 1:
            (one,) = wanted
            work = ExpertWork(stack, one.experts, one.counts, one.x, one.places, one.weights)
            return [experts.outputs(layer, work, prompt=is_prompt)]
        chosen = np.concatenate([np.repeat(each.experts, each.counts) for each in wanted])
        order = np.argsort(chosen, kind="stable")
        starts = np.cumsum([0, *(len(each.x) for each in wanted[:-1])])
        rows = np.concatenate(
            [each.places + np.int32(start) for each, start in zip(wanted, starts, strict=True)]
        ).astype(np.int32)
        weights = np.concatenate([each.weights for each in wanted])
        ids, counts = np.unique(chosen, return_counts=True)
        x = np.concatenate([each.x for each in wanted])
        work = ExpertWork(
            stack, ids.astype(np.int32), counts.astype(np.int32), x, rows[order], weights[order]
        )
        values = np.empty((len(order), x.shape[1]), np.float32)
        values[order] = experts.outputs(layer, work, prompt=is_prompt)
        ends = np.cumsum([each.num_pairs for each in wanted])
        return np.split(values, ends[:-1])


def _least_overlapped(chunk: Chunk, own: Rows) -> int:
    """Return from how many pairs on a rank computes its own apart."""
    is_part = isinstance(chunk, ChunkPart)
    return _OVERLAPPED_ROWS * len(own.experts) if is_part else _OVERLAPPED_PAIRS


def _pairs(plan: DispatchPlan) -> IntArray:
    """Return the dispatch's pairs in the order of the outputs: int32 [pairs]."""
    pairs = [plan.parts[rank].pairs for rank in sorted(plan.parts)]
    return np.concatenate(pairs) if pairs else np.empty(0, np.int32)
