"""What drafters keep of a step with a tree: the rows of the right way down, in their places."""

from __future__ import annotations

import numpy as np

from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kv.pool import KVPool
from thermocline.messages import LayerIndex, RequestId
from thermocline.speculation.contract import Verified
from thermocline.speculation.followed import Followed, follow_moves


def states_of(tokens):
    return np.array(tokens, np.float32)[:, None]


def followed_after_a_tree() -> Followed:
    """Three known positions, then a step with row 0 and five drafted ones from position 3 on."""
    followed = Followed()
    followed.keep(0, [1, 2, 3], states_of([1, 2, 3]))
    followed.keep(3, [4, 50, 51, 52, 53, 54], states_of([4, 50, 51, 52, 53, 54]))
    return followed


def test_rows_of_the_right_way_stay():
    """They move to the positions that they stand for."""
    followed = followed_after_a_tree()
    followed.take(Verified(RequestId(1), 3, (51, 53, 99), 5, 2, rows=(2, 4)))
    assert followed.tokens == [1, 2, 3, 4, 51, 53]
    assert [float(state[0]) for state in followed.states] == followed.tokens
    assert followed.end == 6


def test_of_a_chain_the_first_rows_stay():
    """Whether they are named or not."""
    for rows in ((), (1, 2)):
        followed = followed_after_a_tree()
        followed.take(Verified(RequestId(1), 3, (50, 51, 99), 5, 2, rows=rows))
        assert followed.tokens == [1, 2, 3, 4, 50, 51]
    followed = followed_after_a_tree()
    followed.take(Verified(RequestId(1), 3, (99,), 5, 0))
    assert followed.tokens == [1, 2, 3, 4]


def test_a_branch_s_blocks_get_what_the_request_s_had():
    """In all layers, and its table names them from then on."""
    pool = KVPool([HeadShape(2, 4)] * 2, 6, 4, CacheType.F32)
    layers = [LayerIndex(0), LayerIndex(1)]
    for layer in layers:
        for array in (pool.layer(layer).keys, pool.layer(layer).values):
            array[:] = np.arange(6, dtype=np.uint8)[:, None, None] + 10 * int(layer)
    followed = Followed(table=np.array([0, 3, 1], np.int32))
    verified = Verified(RequestId(1), 3, (51,), 5, 1, rows=(2,), moved=((3, 5), (1, 2)))
    follow_moves(followed, verified, pool, layers)
    assert followed.table.tolist() == [0, 5, 2]
    for layer in layers:
        for array in (pool.layer(layer).keys, pool.layer(layer).values):
            numbers = array[:, 0, 0] - 10 * int(layer)
            assert numbers.tolist() == [0, 1, 1, 3, 4, 3]
