"""The exchange of tokens between ranks, counted and packed without a process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kernel_cases import same_bits
from thermocline.errors import MeshError
from thermocline.experts.dispatch.grouping import dispatch, owners_of
from thermocline.messages import BackendRole, Routing
from thermocline.parallel.dispatch_plan import pack_part, part_bytes, plan_dispatch, unpack_part
from thermocline.parallel.expert_map import ExpertMap, linear_map
from thermocline.parallel.takeover import taken_over, targets
from thermocline.parallel.workspace import Arena, Traffic, WorkspaceLockedError, arena_sizes
from thermocline.remote.payload import PayloadType

E_, K, D = 12, 3, 16


def routed(ids: np.ndarray, seed: int = 0):
    weights = np.random.default_rng(seed).random(ids.shape, np.float32)
    none = np.zeros(E_, bool)
    return dispatch(Routing(ids, weights), owners_of(none, ~none))[BackendRole.REMOTE]


def random_ids(tokens: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = [rng.choice(E_, K, replace=False) for _ in range(tokens)]
    return np.array(ids, np.int32).reshape(tokens, K)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [1, 3, 7, 64, 512])
def test_rows_are_the_distinct_owners_that_tokens_hit(tokens: int, num_ranks: int) -> None:
    """A token goes to each rank once, however many of its experts are there."""
    ids = random_ids(tokens)
    target = targets(linear_map(1, E_, num_ranks), 0)[0]
    plan = plan_dispatch(routed(ids), target, num_ranks)
    hit = sum(len({int(target[expert]) for expert in row}) for row in ids)
    assert plan.rows_to.sum() == hit <= tokens * min(K, num_ranks)
    pairs = np.concatenate([part.pairs for part in plan.parts.values()])
    assert sorted(pairs) == list(range(tokens * K)), "every pair is computed once"
    for rank, part in plan.parts.items():
        assert (target[part.experts] == rank).all()
        assert part.counts.sum() == len(part.places) == len(part.weights)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sending_in_parts_is_sending_once_and_naive_is_tp_times_that(tp: int) -> None:
    """Tokens split over a replica's ranks make the leader's rows; each rank sending all makes tp times as many."""
    tokens = 7
    whole = routed(random_ids(tokens))
    target = targets(linear_map(1, E_, 4), 0)[0]
    leader = plan_dispatch(whole, target, 4).rows_to.sum()
    each = -(-tokens // tp)
    ranges = [range(n * each, min((n + 1) * each, tokens)) for n in range(tp)]
    sequence = sum(plan_dispatch(whole, target, 4, part).rows_to.sum() for part in ranges)
    naive = sum(plan_dispatch(whole, target, 4).rows_to.sum() for _ in range(tp))
    assert sequence == leader
    assert naive == tp * leader


@pytest.mark.parametrize("kind", PayloadType)
def test_a_part_comes_out_as_it_went_in(kind: PayloadType) -> None:
    """Rows, experts, places and weights are the sender's; float32 to the bit."""
    x = np.random.default_rng(3).standard_normal((7, D)).astype(np.float32)
    whole = routed(random_ids(7))
    plan = plan_dispatch(whole, targets(linear_map(1, E_, 3), 0)[0], 3)
    for part in plan.parts.values():
        packed = np.full(part_bytes(part, D, kind), 0xFF, np.uint8)
        pack_part(part, x, kind, packed, is_prompt=True)
        rows = unpack_part(packed, D, E_)
        assert rows.is_prompt
        for name in ("experts", "counts", "places", "weights"):
            assert (getattr(rows, name) == getattr(part, name)).all()
        if kind is PayloadType.F32:
            assert same_bits(rows.x, x[part.tokens])
        else:
            assert np.abs(rows.x - x[part.tokens]).max() < 0.02


@pytest.mark.parametrize("at", range(0, 20, 4))
def test_bytes_of_another_program_are_refused(at: int) -> None:
    """A head that does not fit its bytes raises MeshError, whatever its number."""
    x = np.zeros((7, D), np.float32)
    part = plan_dispatch(routed(random_ids(7)), np.zeros(E_, np.int32), 1).parts[0]
    packed = np.zeros(part_bytes(part, D, PayloadType.F32), np.uint8)
    pack_part(part, x, PayloadType.F32, packed, is_prompt=False)
    packed[at] ^= 0x1F
    with pytest.raises(MeshError):
        unpack_part(packed, D, E_)
    with pytest.raises(MeshError):
        unpack_part(packed[:7], D, E_)


def traffic_of(num_ranks: int, dispatchers: int, tokens: int) -> Traffic:
    owned = -(-E_ // num_ranks)
    return Traffic(dispatchers, tokens, K, owned, D, 4, num_ranks)


@pytest.mark.parametrize(("num_ranks", "dispatchers"), [(4, 4), (4, 2), (2, 2), (3, 1)])
def test_the_worst_routing_reaches_the_capacity_and_nothing_exceeds_it(
    num_ranks: int, dispatchers: int
) -> None:
    """All tokens of all dispatchers to one rank fill its buffers to the byte; the formula counts dispatchers once."""
    tokens = 9
    traffic = traffic_of(num_ranks, dispatchers, tokens)
    sizes = arena_sizes(traffic, E_)
    assert traffic.token_capacity() == dispatchers * tokens
    experts = linear_map(1, E_, num_ranks)
    owned = np.flatnonzero(experts.owner[0, :, 0] == 0)
    rng = np.random.default_rng(4)
    worst = np.array([rng.choice(owned, K, replace=False) for _ in range(tokens)], np.int32)
    worst[: len(owned), 0] = owned[:tokens]  # every expert is hit
    worst[: len(owned), 1] = np.roll(owned, 1)[:tokens]
    worst[: len(owned), 2] = np.roll(owned, 2)[:tokens]
    for ids, is_worst in ((worst, True), (random_ids(tokens), False)):
        received = pairs = rows = 0
        for place in range(dispatchers):
            plan = plan_dispatch(routed(ids), targets(experts, place)[0], num_ranks)
            sent = [part_bytes(part, D, PayloadType.F32) for part in plan.parts.values()]
            assert sum(sent) <= sizes["send"]
            mine = plan.parts.get(0)
            received += part_bytes(mine, D, PayloadType.F32)
            pairs += 0 if mine is None else len(mine.places)
            rows += int(plan.rows_to[0])
        answers = pairs * D * 4
        if is_worst and len(owned) >= K:
            assert (rows, pairs) == (traffic.token_capacity(), traffic.pair_capacity())
            assert (received, answers) == (sizes["receive"], sizes["answer"])
        assert rows <= traffic.token_capacity()
        assert received <= sizes["receive"]
        assert answers <= sizes["answer"]


def test_an_arena_has_the_formulas_bytes_and_never_grows() -> None:
    """Bytes = formula, rounded up per buffer; one byte more raises with the caller's name."""
    arena = Arena()
    sizes = arena_sizes(traffic_of(4, 2, 9), E_)
    for name, nbytes in sizes.items():
        arena.reserve(name, nbytes)
    arena.lock()
    assert arena.nbytes == sum(-(-nbytes // 64) * 64 for nbytes in sizes.values())
    full = {name: arena.take(name, nbytes, "test") for name, nbytes in sizes.items()}
    for number, view in enumerate(full.values()):
        view[:] = number
    assert all((view == number).all() for number, view in enumerate(full.values())), "they overlap"
    with pytest.raises(WorkspaceLockedError, match=r"a caller takes .* bytes of 'send'"):
        arena.take("send", -(-sizes["send"] // 64) * 64 + 1, "a caller")
    with pytest.raises(WorkspaceLockedError, match="locked"):
        arena.reserve("send", 1)


def test_those_that_are_left_take_over_what_was_lost_and_keep_their_own() -> None:
    """Experts with an owner left stay there; the others go to the ranks with the fewest."""
    before = linear_map(2, E_, 4)
    after = taken_over(before, [0, 2, 3])
    old, new = before.owner[..., 0], after.owner[..., 0]
    for was, now in ((0, 0), (2, 1), (3, 2)):
        assert (new[old == was] == now).all()
    counts = np.bincount(new[0], minlength=3)
    assert counts.tolist() == [4, 4, 4]


def test_replicas_of_an_expert_outlive_one_owner() -> None:
    """An expert with two owners stays with the one that is left; a rank that owns it computes it itself."""
    owner = np.array([[[0, 1], [1, -1], [2, 0]]], np.int32)
    experts = ExpertMap(owner)
    assert targets(experts, 0)[0].tolist() == [0, 1, 0]
    assert targets(experts, 2)[0].tolist() == [0, 1, 2]
    left = taken_over(experts, [0, 2])
    assert left.owner[0].tolist() == [[0, -1], [1, -1], [1, 0]]
