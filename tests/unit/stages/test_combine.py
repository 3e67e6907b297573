"""Combine: the sum of a token is taken in slot order, whatever the tiers and their order of arrival."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tests.support.chunks import make_chunk, make_work, partial_sum
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import Joined
from thermocline.stages.combine import combine


@pytest.fixture(params=[NativeKernels, ReferenceKernels], ids=["native", "reference"])
def dense(request):
    """Each implementation of the sum."""
    return request.param().dense


ROUTES = [[0, 3, 1], [2, 1, 0], [3, 2, 1], [1, 0, 3], [0, 2, 3]]


def test_every_split_gives_the_same_bits(dense):
    """All 16 splits of four experts between hot and cold, in both orders of arrival."""
    results = []
    for size in range(5):
        for hot in combinations(range(4), size):
            work = make_work(make_chunk(num_tokens=5), ROUTES, set(hot), hidden=64)
            partials = tuple(partial_sum(work, tier) for tier in work.expects)
            results += [
                combine(dense, Joined(work, partials)),
                combine(dense, Joined(work, partials[::-1])),
            ]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_the_order_is_slot_order_plus_residual(dense):
    """((slot 0 + slot 1) + slot 2) + residual, written out."""
    work = make_work(make_chunk(num_tokens=5), ROUTES, {1}, hidden=64)
    partials = tuple(partial_sum(work, tier) for tier in work.expects)
    expected = np.zeros((5, 64), np.float32)
    for token, experts in enumerate(ROUTES):
        parts = [
            work.x[token] * np.float32(expert + 1) * work.routing.weights[token, slot]
            for slot, expert in enumerate(experts)
        ]
        expected[token] = ((parts[0] + parts[1]) + parts[2]) + work.residual[token]
    np.testing.assert_array_equal(combine(dense, Joined(work, partials)), expected)
