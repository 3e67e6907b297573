"""One layer on several ranks: bit for bit what one process computes, with as many rows on the way as there must be."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.chunks import make_chunk, make_decode
from tests.support.kernel_cases import same_bits
from tests.support.thread_ranks import ThreadWorld
from tests.support.toy_archs import write_toy_arch
from thermocline.errors import GroupLostError, MeshError
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.dispatch.grouping import dispatch, owners_of, pairs_by_slot
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import Contributions
from thermocline.messages import BackendRole, LayerIndex, LayerWork, Routing
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.parallel.exchange import LayerExchange, RankParts, RankRole
from thermocline.parallel.exchange_jobs import ExchangeFigures, ExchangeJobs
from thermocline.parallel.expert_map import linear_map
from thermocline.parallel.mesh import make_mesh
from thermocline.parallel.parts import mixing_of
from thermocline.parallel.rank import MeshPlan, _arena
from thermocline.parallel.rank_experts import RankExperts
from thermocline.parallel.takeover import owned_counts, targets
from thermocline.parallel.turns import ExchangeKind, LayerTurns, RoundTurns, StepTurns, TurnThread
from thermocline.remote.payload import PayloadType
from thermocline.traces.recorder import NullRecorder

LAYER = LayerIndex(1)
KINDS = ("leader", "sequence", "naive")


class InlineLane:
    """A lane whose jobs run at once."""

    async def run(self, name, job, chunk, layer=None, **counts):
        """Run the job here."""
        return job()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A toy model, its kernels and catalog."""
    path = write_toy_arch(tmp_path_factory.mktemp("exchange") / "toy.gguf", ARCH_CASES[0].toy)
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        yield model, kernels, ExpertCatalog(model.expert_layers)


def some_work(model, tokens: int, seed: int, *, is_prompt: bool, to: int | None = None):
    """Return a layer's work and dispatch of so many tokens. to: all of them choose this expert first."""
    rng, spec = np.random.default_rng(seed), model.spec
    num_experts, used = spec.router.num_experts, spec.router.num_experts_used
    ids = np.array([rng.choice(num_experts, used, replace=False) for _ in range(tokens)], np.int32)
    if to is not None:
        ids = np.array([[to, *[n for n in range(num_experts) if n != to][: used - 1]]] * tokens)
        ids = ids.astype(np.int32)
    routing = Routing(ids, rng.random(ids.shape).astype(np.float32))
    x = rng.standard_normal((tokens, spec.expert_hidden_size)).astype(np.float32)
    residual = rng.standard_normal(x.shape).astype(np.float32)
    chunk = make_chunk(num_tokens=tokens)
    chunk = chunk if is_prompt else make_decode(chunk)
    none = np.zeros(num_experts, bool)
    shares = dispatch(routing, owners_of(none, ~none))
    work = LayerWork(chunk, LAYER, residual, x, routing, shares)
    return work, shares[BackendRole.REMOTE]


def expected_sum(kernels, catalog, given) -> np.ndarray:
    """Return what one process computes."""
    work, pairs = given
    experts = ExpertWork(
        *(catalog.stack(LAYER), pairs.experts, pairs.counts, work.x, pairs.rows, pairs.weights)
    )
    pair_of = pairs_by_slot(work.routing, pairs)
    return kernels.expert_sum(experts, pair_of, work.residual, prompt=work.chunk.is_prompt)


class Ranks:
    """Ranks of one layer, each on a thread."""

    def __init__(self, opened, dp: int, tp: int, kind: str, max_tokens: int, world=None) -> None:
        model, self.kernels, self.catalog = opened
        spec, self.mesh = model.spec, make_mesh(dp * tp, dp, tp)
        self.world = world or ThreadWorld(10.0)
        experts = linear_map(spec.num_layers, spec.router.num_experts, dp * tp)
        used = spec.router.num_experts_used
        plan = MeshPlan(self.mesh, experts, kind, max_tokens, used)
        self.shares = tp > 1 and kind != "naive"
        self.in_blocks = True
        self.figures = [ExchangeFigures() for _ in self.mesh.ranks]
        self.arenas, self.exchanges, self.threads = [], [], []
        for rank in self.mesh.ranks:
            owned = int(owned_counts(experts, rank).max())
            traffic = plan.traffic(self.mesh, owned, spec.expert_hidden_size, 4)
            self.traffic = replace(traffic, num_owned=experts.owner.shape[1])
            self.arenas.append(_arena(traffic, experts.owner.shape[1]))
            self.threads.append(TurnThread())
            group = self.world.connector(rank)(0, rank, self.mesh.size)
            peers = self.mesh.peers(rank)
            role = RankRole(group, targets(experts, rank), peers, kind)
            parts = RankParts(
                *(self.catalog, self.kernels, RankExperts(self.kernels), InlineLane()),
                *(NullRecorder(), self.threads[-1]),
                *(PayloadType.F32, spec.expert_hidden_size, used, mixing_of(spec)),
            )
            figures = self.figures[rank]
            jobs = ExchangeJobs(self.threads[-1], NullRecorder(), figures)
            exchange = LayerExchange(parts, role, self.arenas[-1], jobs, figures)
            self.exchanges.append(exchange)

    def run(self, works) -> list:
        """Return what each rank gets. works: by replica; None for one without tokens."""
        layers = [LayerTurns(mixes=False, routes=layer == LAYER) for layer in range(LAYER + 1)]
        turns = StepTurns(0, layers, [RoundTurns(divides=False, shares=self.shares)])

        def one(rank: int):
            given = works[self.mesh.replica_of(rank)]
            chunk = make_chunk() if given is None else given[0].chunk
            most = max((0 if each is None else len(each[0].x) for each in works), default=0)
            block_bytes = self.traffic.block_bytes(most) if self.in_blocks else 0
            exchange = self.exchanges[rank]
            return asyncio.run(exchange.run(turns, 0, chunk, LAYER, given, block_bytes))

        with ThreadPoolExecutor(self.mesh.size) as pool:
            return list(pool.map(one, self.mesh.ranks))

    def close(self) -> None:
        """End the threads."""
        for thread in self.threads:
            thread.close()


def summed(ranks: Ranks, found, given) -> np.ndarray:
    """Return a rank's result as the layer's sum."""
    if isinstance(found, Contributions):
        num_slots = given[0].routing.expert_ids.shape[1]
        return ranks.kernels.dense.combine(given[0].residual, [found], num_slots)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize(
    ("counts", "to"),
    [
        ((1, 0, 3, 7), None),
        ((0, 1, 0, 64), None),
        ((7, 7, 1, 0), 2),
        ((512, 3, 64, 0), None),
        ((64, 64, 64, 64), 0),
    ],
)
@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_layer_is_bit_for_bit_that_of_one_process(dp, tp, kind, counts, to, in_blocks, opened):
    """Unequal tokens by replica, none at all, all to one expert, prompts beside answers; rows as many as must be."""
    model, kernels, catalog = opened
    works = [
        None if not count else some_work(model, count, n, is_prompt=count > 3, to=to)
        for n, count in enumerate(counts[:dp])
    ]
    with ExitStack() as stack:
        ranks = Ranks(opened, dp, tp, kind, max(counts))
        stack.callback(ranks.close)
        ranks.in_blocks = in_blocks
        found = ranks.run(works)
    target = targets(linear_map(model.spec.num_layers, model.spec.router.num_experts, dp * tp), 0)
    distinct = 0
    for rank, result in enumerate(found):
        given = works[ranks.mesh.replica_of(rank)]
        if given is None:
            assert result is None
            continue
        assert same_bits(summed(ranks, result, given), expected_sum(kernels, catalog, given))
        if rank % tp == 0:
            ids = given[0].routing.expert_ids
            distinct += sum(len(set(target[LAYER][row].tolist())) for row in ids)
    sent = sum(figures.total_rows_sent for figures in ranks.figures)
    assert sent == distinct * (tp if kind == "naive" else 1)
    for rank, arena in enumerate(ranks.arenas):
        assert ranks.figures[rank].peak_layer_rows <= (1 if kind == "leader" else tp) * dp * max(
            counts
        )
        assert all(peak <= arena.nbytes for peak in arena.peak_bytes.values())


def test_a_rank_that_is_lost_ends_the_layer_for_all(opened):
    """Whoever waits gets GroupLostError, and later exchanges fail at once until there is a new group."""
    world = ThreadWorld(10.0, {2: 1})
    ranks = Ranks(opened, 3, 1, "leader", 8, world)
    works = [some_work(opened[0], 5, n, is_prompt=True) for n in range(3)]
    with pytest.raises(GroupLostError):
        ranks.run(works)
    for thread in ranks.threads:
        with pytest.raises(MeshError):
            thread.submit(99, lambda: None).result(10)
        thread.restart()
        assert thread.submit(1, lambda: "second") is not None
        assert thread.submit(0, lambda: "first").result(10) == "first"
    ranks.close()


def test_jobs_run_by_their_turns_however_they_come():
    """A later turn that is given first waits; one job at a time."""
    thread, order = TurnThread(), []
    futures = [thread.submit(turn, lambda turn=turn: order.append(turn)) for turn in (3, 1, 2, 0)]
    for future in futures:
        future.result(10)
    assert order == [0, 1, 2, 3]
    thread.close()
    with pytest.raises(MeshError, match="closed"):
        thread.submit(4, lambda: None).result(10)


def test_two_rounds_take_turns_layer_by_layer():
    """Every exchange has a turn of its own: the other round's comes between two of one round. What one round or layer has
    not takes no turn."""
    mix, rows, answers, share = ExchangeKind
    dense, routed, alone = LayerTurns(True, False), LayerTurns(True, True), LayerTurns(False, True)
    rounds = [RoundTurns(divides=True, shares=False), RoundTurns(divides=False, shares=True)]
    turns = StepTurns(10, [dense, routed, alone], rounds)
    expected = [
        (0, mix, 0),
        *((1, mix, 0), (1, rows, 0), (1, rows, 1), (1, answers, 0), (1, answers, 1), (1, share, 1)),
        *((2, rows, 0), (2, rows, 1), (2, answers, 0), (2, answers, 1), (2, share, 1)),
    ]
    assert [turns.of(*each) for each in expected] == list(range(10, 22))
    for layer, each, at in ((0, mix, 1), (0, rows, 0), (1, share, 0), (2, mix, 0)):
        with pytest.raises(KeyError):
            turns.of(layer, each, at)
    assert (turns.results, turns.end) == (22, 23)
