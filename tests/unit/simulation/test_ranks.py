"""Steps on several ranks, against times added up by hand, and counts against their definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from thermocline.errors import ConfigError
from thermocline.simulation.exchange import Exchange, Link
from thermocline.simulation.ranks import Dispatch, RankCosts, RankSetup, simulate_step

# A row of 8 bytes takes a second, and so do a count and a choice; nothing else takes time.
LINK = Link("by hand", 8.0, 0.0, 0.0, 0.0)
# Attention takes a second per token; an expert 10 seconds and one per row.
COSTS = RankCosts(lambda tokens, seen: float(tokens), lambda rows: 10.0 * len(rows) + rows.sum())
# One layer of two experts, one on each of two ranks.
OWNER = np.array([[[0], [1]]], np.int32)


def setup_of(dp, tp, dispatch=Dispatch.LEADER, exchange=Exchange.COLLECTIVE, **more):
    return RankSetup(dp, tp, OWNER, LINK, dispatch, exchange, hidden=4, **more)


def tokens(*experts):
    """Tokens that chose one expert each, in the one layer."""
    return np.array(experts, np.int16).reshape(-1, 1, 1)


def test_two_replicas_together():
    """Rank 0 has tokens for both experts, rank 1 one for its own; each operation waits for both ranks."""
    found = simulate_step([tokens(1, 0), tokens(1)], 0, setup_of(2, 1), COSTS)
    # Attention until 2 and 1; counts until 3; a row with its choice until 5; experts until 16 and 5 + 10 + 2; an
    # output until 18.
    assert found.seconds == 18.0
    assert found.total_rows == 1
    assert found.total_bytes == (8 + 8) + 16 + 8
    assert found.expert_rows == 3
    assert found.busy_share == (2 + 1 + 11 + 12) / (2 * 18)
    assert found.max_received_rows == 2


def test_two_replicas_by_messages():
    """Rank 1 computes its own token at once, and reads the expert again for rank 0's."""
    found = simulate_step(
        [tokens(1, 0), tokens(1)], 0, setup_of(2, 1, exchange=Exchange.POINT_TO_POINT), COSTS
    )
    # Rank 1's own from 1 to 12; rank 0's row comes at 4, is computed from 12 to 23, and its output is back at 24.
    assert found.seconds == 24.0
    assert found.total_bytes == 16 + 8


@pytest.mark.parametrize(
    ("dispatch", "seconds", "rows", "expert_rows"),
    [
        # Attention until 1, two gathers until 3, counts until 4. Rows until 8, experts until 20, outputs until 22,
        # and the broadcast of two rows until 24.
        (Dispatch.LEADER, 24.0, 2, 2),
        # One row until 6, both of them computed until 18, its output until 19, gathered until 20.
        (Dispatch.SEQUENCE, 20.0, 1, 2),
        # Two rows until 8, four computed until 22, two outputs until 24, and nothing to share.
        (Dispatch.NAIVE, 24.0, 2, 4),
    ],
)
def test_one_replica_of_two_ranks(dispatch, seconds, rows, expert_rows):
    """Two tokens for the second rank's expert, by each kind of dispatch."""
    found = simulate_step([tokens(1, 1)], 0, setup_of(1, 2, dispatch), COSTS)
    assert (found.seconds, found.total_rows, found.expert_rows) == (seconds, rows, expert_rows)


def test_two_chunks_in_flight():
    """The second chunk's attention and rows go beside the first one's; each expert is read twice."""
    choices = [tokens(1, 1), tokens()]
    assert simulate_step(choices, 0, setup_of(2, 1), COSTS).seconds == 21.0
    found = simulate_step(choices, 0, setup_of(2, 1, num_chunks=2), COSTS)
    # First chunk: attention 1, counts 2, row 4, expert 15, output 16. Second: attention 2, counts 5, row 7, expert
    # 26, output 27.
    assert found.seconds == 27.0
    # Where experts cost by the row alone, the overlap pays: 13 seconds instead of 17.
    by_row = replace(COSTS, expert_s=lambda rows: 4.0 * rows.sum())
    assert simulate_step(choices, 0, setup_of(2, 1), by_row).seconds == 17.0
    assert simulate_step(choices, 0, setup_of(2, 1, num_chunks=2), by_row).seconds == 13.0


def test_copies_take_turns():
    """An expert on both ranks computes every other token on each."""
    owner = np.array([[[0, 1]]], np.int32)
    setup = replace(setup_of(2, 1), owner=owner)
    found = simulate_step([tokens(0, 0, 0, 0), tokens()], 0, setup, COSTS)
    assert found.total_rows == 2
    assert found.max_received_rows == 2


@pytest.mark.parametrize("exchange", Exchange)
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_counts_are_by_definition(dp, tp, exchange):
    """Rows are the distinct owners of each token, without the dispatcher; naive computes tp times as many."""
    draw = np.random.default_rng(dp * 10 + tp)
    num_layers, num_experts, num_ranks = 2, 12, dp * tp
    owner = draw.integers(0, num_ranks, (num_layers, num_experts, 1)).astype(np.int32)
    sizes = (0, 1, 3, 17)
    choices = [
        np.argsort(draw.random((sizes[(n + dp) % 4], num_layers, num_experts)), axis=2)[
            :, :, :3
        ].astype(np.int16)
        for n in range(dp)
    ]
    setup = RankSetup(dp, tp, owner, LINK, Dispatch.LEADER, exchange, hidden=4)
    expected = pairs = 0
    for replica, chosen in enumerate(choices):
        for layer in range(num_layers):
            for experts in chosen[:, layer]:
                expected += len({int(owner[layer, each, 0]) for each in experts} - {replica * tp})
                pairs += len(experts)
    leader = simulate_step(choices, 5, setup, COSTS)
    assert (leader.total_rows, leader.expert_rows) == (expected, pairs)
    sequence = simulate_step(choices, 5, replace(setup, dispatch=Dispatch.SEQUENCE), COSTS)
    naive = simulate_step(choices, 5, replace(setup, dispatch=Dispatch.NAIVE), COSTS)
    assert sequence.expert_rows == pairs
    assert naive.expert_rows == tp * pairs
    assert naive.max_received_rows == tp * leader.max_received_rows
    assert 0 < leader.busy_share <= 1 or not pairs


def test_no_tokens_at_all():
    """A step without tokens ends, and with messages takes no time."""
    found = simulate_step(
        [tokens(), tokens()], 0, setup_of(2, 1, exchange=Exchange.POINT_TO_POINT), COSTS
    )
    assert (found.seconds, found.total_rows, found.busy_share) == (0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: setup_of(1, 1), "each expert needs a rank from 0 to 0"),
        (lambda: setup_of(0, 2), "1 or more"),
        (lambda: simulate_step([tokens(0)], 0, setup_of(2, 1), COSTS), "2 of them"),
        (lambda: simulate_step([tokens(2)], 0, setup_of(1, 2), COSTS), "other layers or experts"),
    ],
)
def test_refusals(make, says):
    """What does not fit is refused with the reason."""
    with pytest.raises(ConfigError, match=says):
        make()
