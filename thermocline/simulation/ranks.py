"""Steps of a model whose experts are on several ranks, by a virtual clock: what each way of exchange would take. Pure.

Ranks form replicas of tp ranks each. A replica has requests of its own; its ranks share the work of attention, and
gather its parts. In each layer the rows of tokens go to the ranks of their experts and the outputs back, one per
token and expert. A rank has one processor (or device) and one link, which work at once for different chunks. Ranks'
numbers are replica * tp + number in the replica. Knows no real clock, no process group and no machine: prices are
handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.errors import ConfigError
from thermocline.simulation.exchange import Exchange, Links, Message
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thermocline.messages import ExpertIds, IntArray
    from thermocline.simulation.exchange import Bytes, Link, Seconds

# Of an expert's id and its weight; of a rank's count of rows.
_CHOICE_BYTES: Final = 8
_COUNT_BYTES: Final = 8
# Heads' outputs, and the rows of the projection behind them.
_GATHERS: Final = 2


class Dispatch(StrEnum):
    """Which ranks of a replica send its tokens: its value is what tables call it."""

    LEADER = "leader"
    """The first rank sends all, and broadcasts the results."""
    SEQUENCE = "sequence"
    """Each rank sends its share of the tokens, and the results are gathered."""
    NAIVE = "naive"
    """Every rank sends all of them, as each has them: for comparison."""


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What ranks compute. attend_s: of a layer without its routed experts, given (tokens, tokens that each sees),
    on one rank; expert_s: of some experts of a layer, given the rows of each, int32 [n].
    """

    attend_s: Callable[[int, int], float]
    expert_s: Callable[[IntArray], float]


@dataclass(frozen=True, slots=True, eq=False)
class RankSetup:
    """The ranks, and how they exchange.

    owner: int32 [layers, experts, copies], the ranks of each expert, -1 for none; tokens take an expert's copies in
    turns. hidden: numbers of a row; item_bytes: of each of them on the link. num_chunks: how many chunks a step's
    tokens are divided into, one of which is computed while another one is sent.
    """

    dp: int
    tp: int
    owner: IntArray
    link: Link
    dispatch: Dispatch
    exchange: Exchange
    hidden: int
    item_bytes: int = 2
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.num_chunks, self.hidden, self.item_bytes) < 1:
            raise ConfigError("replicas, ranks, chunks and the size of a row must be 1 or more")
        if self.owner.max() >= self.num_ranks or self.owner[:, :, 0].min() < 0:
            raise ConfigError(f"each expert needs a rank from 0 to {self.num_ranks - 1}")

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp

    @property
    def row_bytes(self) -> int:
        """Of one token's row, or of one output."""
        return self.hidden * self.item_bytes


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step of all replicas together.

    seconds: until the last rank has all layers. total_rows: rows that went to other ranks; total_bytes: of all that was
    sent. expert_rows: rows of single experts that were computed. busy_share: the part of `seconds` in which the ranks
    computed, their mean. max_received_rows: the most rows that a rank had from all in one chunk and layer, its own included.
    """

    seconds: float
    total_rows: int
    total_bytes: int
    expert_rows: int
    busy_share: float
    max_received_rows: int


def simulate_step(
    choices: Sequence[ExpertIds], num_seen: int, setup: RankSetup, costs: RankCosts
) -> StepFigures:
    """Return the figures of one step.

    choices: of each replica's tokens, int16 [tokens, layers, K]; replicas may have different numbers of tokens, also
    none. num_seen: tokens that each of them sees, on average. Raises ConfigError where choices do not fit the setup.
    """
    if len(choices) != setup.dp:
        raise ConfigError(f"there are tokens for {len(choices)} replicas, and {setup.dp} of them")
    for chosen in choices:
        num_layers, num_experts, _ = setup.owner.shape
        if chosen.shape[1] != num_layers or (chosen.size and chosen.max() >= num_experts):
            raise ConfigError("the routing has other layers or experts than the map of ranks")
    return _Step(choices, num_seen, setup, costs).run()


class _Sent(NamedTuple):
    """What dispatchers send in one layer. rows: int64 [from, to], rows to each rank; pairs: the same for
    token-expert pairs; experts: int64 [from, to, experts], the rows of each expert.
    """

    rows: Bytes
    pairs: Bytes
    experts: Bytes


class _Step:
    def __init__(
        self, choices: Sequence[ExpertIds], num_seen: int, setup: RankSetup, costs: RankCosts
    ) -> None:
        num_chunks = setup.num_chunks
        split = [np.array_split(chosen, num_chunks) for chosen in choices]
        self._chunks = [[parts[index] for parts in split] for index in range(num_chunks)]
        self._num_seen, self._setup, self._costs = num_seen, setup, costs
        self._links = Links(setup.link, setup.num_ranks)
        # When each rank's processor is free, and when each chunk is on each rank.
        self._free: Seconds = np.zeros(setup.num_ranks)
        self._ready: list[Seconds] = [np.zeros(setup.num_ranks) for _ in range(num_chunks)]
        self._busy_s = 0.0
        self._total_rows = self._expert_rows = self._max_received = 0

    def run(self) -> StepFigures:
        """Compute all layers; chunks take turns in each part of a layer."""
        for layer in range(len(self._setup.owner)):
            for index in range(len(self._chunks)):
                self._attend(index)
            sent = [self._sent(index, layer) for index in range(len(self._chunks))]
            if self._setup.exchange is Exchange.COLLECTIVE:
                self._exchange_together(sent)
            else:
                for index, each in enumerate(sent):
                    self._exchange_singly(index, each)
            for index in range(len(self._chunks)):
                self._share(index)
        seconds = max(float(ready.max()) for ready in self._ready)
        num_ranks = self._setup.num_ranks
        return StepFigures(
            seconds,
            self._total_rows,
            self._links.total_bytes,
            self._expert_rows,
            self._busy_s / (seconds * num_ranks) if seconds else 0.0,
            self._max_received,
        )

    def _attend(self, index: int) -> None:
        """Each rank of a replica computes its part of attention; the parts are gathered twice."""
        setup = self._setup
        for replica, chosen in enumerate(self._chunks[index]):
            num_tokens = len(chosen)
            if num_tokens:
                seconds = self._costs.attend_s(num_tokens, self._num_seen) / setup.tp
                for rank in self._ranks_of(replica).tolist():
                    self._compute(index, rank, seconds)
            if setup.tp > 1 and num_tokens:
                for _ in range(_GATHERS):
                    self._gather(index, replica, num_tokens)

    def _gather(self, index: int, replica: int, num_tokens: int) -> None:
        """Each rank of a replica gets the others' parts of the rows, each part being sent to each rank."""
        setup, ranks = self._setup, self._ranks_of(replica)
        others = num_tokens * setup.row_bytes * (setup.tp - 1) // setup.tp
        nbytes = np.full(setup.tp, others, np.int64)
        ready = self._ready[index]
        ready[ranks] = self._links.collective(ranks, ready[ranks], nbytes, nbytes)

    def _sent(self, index: int, layer: int) -> _Sent:
        setup = self._setup
        num_ranks, num_experts = setup.num_ranks, setup.owner.shape[1]
        experts = np.zeros((num_ranks, num_ranks, num_experts), np.int64)
        rows = np.zeros((num_ranks, num_ranks), np.int64)
        for replica, chosen in enumerate(self._chunks[index]):
            for number, rank in enumerate(self._ranks_of(replica).tolist()):
                mine = self._dispatched(len(chosen), number)
                ids = chosen[mine, layer].astype(np.int64)
                owners = self._owners(layer, ids, mine)
                np.add.at(experts[rank], (owners, ids), 1)
                hit = np.zeros((len(ids), num_ranks), bool)
                np.put_along_axis(hit, owners, values=True, axis=1)
                rows[rank] = hit.sum(axis=0)
        pairs = experts.sum(axis=2)
        self._total_rows += int(rows.sum() - np.trace(rows))
        self._expert_rows += int(pairs.sum())
        self._max_received = max(self._max_received, int(rows.sum(axis=0).max()))
        return _Sent(rows, pairs, experts)

    def _dispatched(self, num_tokens: int, number: int) -> IntArray:
        """Return which of a replica's tokens its rank of this number sends."""
        tokens = np.arange(num_tokens, dtype=np.int32)
        match self._setup.dispatch:
            case Dispatch.LEADER:
                return tokens if number == 0 else tokens[:0]
            case Dispatch.SEQUENCE:
                size = ceil_div(num_tokens, self._setup.tp)
                return tokens[number * size : (number + 1) * size]
            case Dispatch.NAIVE:
                return tokens

    def _owners(self, layer: int, ids: Bytes, tokens: IntArray) -> Bytes:
        """Return the rank that computes each pair, [tokens, K]: copies take turns by token."""
        owner = self._setup.owner[layer]
        copies = (owner >= 0).sum(axis=1)
        chosen: Bytes = owner[ids, tokens[:, None] % copies[ids]].astype(np.int64)
        return chosen

    def _exchange_together(self, sent: Sequence[_Sent]) -> None:
        """Counts, then rows; experts; outputs: each an operation of all ranks, for one chunk after the other."""
        setup, everyone = self._setup, np.arange(self._setup.num_ranks)
        counts = np.full(setup.num_ranks, _COUNT_BYTES * (setup.num_ranks - 1), np.int64)
        for index, each in enumerate(sent):
            ready = self._links.collective(everyone, self._ready[index], counts, counts)
            nbytes = self._request_bytes(each)
            self._ready[index] = self._links.collective(
                everyone, ready, nbytes.sum(axis=1), nbytes.sum(axis=0)
            )
        for index, each in enumerate(sent):
            for rank in everyone.tolist():
                rows = each.experts[:, rank].sum(axis=0)
                self._compute(index, rank, self._expert_s(rows))
        for index, each in enumerate(sent):
            nbytes = self._answer_bytes(each)
            self._ready[index] = self._links.collective(
                everyone, self._ready[index], nbytes.sum(axis=0), nbytes.sum(axis=1)
            )

    def _exchange_singly(self, index: int, sent: _Sent) -> None:
        """Each dispatcher asks each rank that it needs; a rank answers requests in the order in which they come."""
        ready = self._ready[index]
        nbytes, back = self._request_bytes(sent), self._answer_bytes(sent)
        asked = [(int(one), int(other)) for one, other in np.argwhere(sent.pairs)]
        remote = [pair for pair in asked if pair[0] != pair[1]]
        arrivals = self._links.send(
            Message(one, other, int(nbytes[one, other]), ready[one]) for one, other in remote
        )
        requests = [(ready[one], one, one) for one, other in asked if one == other]
        requests += [(end_s, *pair) for end_s, pair in zip(arrivals, remote, strict=True)]
        answers: list[Message] = []
        done = ready.copy()
        for came_s, one, other in sorted(requests):
            seconds = self._expert_s(sent.experts[one, other])
            self._free[other] = max(came_s, self._free[other]) + seconds
            self._busy_s += seconds
            if one == other:
                done[one] = max(done[one], self._free[one])
            else:
                end_s = float(self._free[other])
                answers.append(Message(other, one, int(back[one, other]), end_s))
        for message, end_s in zip(answers, self._links.send(answers), strict=True):
            done[message.receiver] = max(done[message.receiver], end_s)
        self._ready[index] = done

    def _share(self, index: int) -> None:
        """The ranks of a replica get all results, as their attention needs them."""
        setup = self._setup
        if setup.tp == 1 or setup.dispatch is Dispatch.NAIVE:
            return
        for replica, chosen in enumerate(self._chunks[index]):
            if setup.dispatch is Dispatch.SEQUENCE and len(chosen):
                self._gather(index, replica, len(chosen))
            elif len(chosen):
                nbytes = len(chosen) * setup.row_bytes
                ranks, ready = self._ranks_of(replica), self._ready[index]
                sent = np.zeros(setup.tp, np.int64)
                # Passed on from rank to rank, as broadcasts of much data are.
                sent[:-1] = nbytes
                ready[ranks] = self._links.collective(ranks, ready[ranks], sent, sent[::-1])

    def _compute(self, index: int, rank: int, seconds: float) -> None:
        """Let a rank compute something of a chunk, as soon as the chunk is there and the rank is free."""
        ready = self._ready[index]
        self._free[rank] = ready[rank] = max(ready[rank], self._free[rank]) + seconds
        self._busy_s += seconds

    def _expert_s(self, rows: Bytes) -> float:
        used = rows[rows > 0].astype(np.int32)
        return self._costs.expert_s(used) if len(used) else 0.0

    def _request_bytes(self, sent: _Sent) -> Bytes:
        """Return the bytes between ranks, int64 [from, to], 0 within a rank."""
        nbytes: Bytes = sent.rows * self._setup.row_bytes + sent.pairs * _CHOICE_BYTES
        np.fill_diagonal(nbytes, 0)
        return nbytes

    def _answer_bytes(self, sent: _Sent) -> Bytes:
        """Return the bytes of the outputs, by those who asked and who answer, 0 within a rank."""
        nbytes: Bytes = sent.pairs * self._setup.row_bytes
        np.fill_diagonal(nbytes, 0)
        return nbytes

    def _ranks_of(self, replica: int) -> Bytes:
        tp = self._setup.tp
        return np.arange(replica * tp, (replica + 1) * tp)
