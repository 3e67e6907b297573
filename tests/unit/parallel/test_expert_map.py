"""The linear map gives each rank a run of neighbouring experts."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.parallel.expert_map import linear_map


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "expected"),
    [(4, 1, [0, 0, 0, 0]), (4, 2, [0, 0, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (3, 4, [0, 1, 2])],
)
def test_experts_follow_each_other(num_experts, num_ranks, expected):
    """Each layer has the same owners, one each, in order."""
    found = linear_map(2, num_experts, num_ranks).owner
    assert found.dtype == np.int32
    assert found.tolist() == [[[rank] for rank in expected]] * 2
