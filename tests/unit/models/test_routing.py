"""Routing rules and the rotary table against formulas written out."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import Routing
from thermocline.models.layers import RotaryTable
from thermocline.models.rope import RopeRule
from thermocline.models.router_rule import RouterRule
from thermocline.models.routing import routing_rule


def route(dense, logits, rule):
    """Return the routing of a model with this rule."""
    return Routing(*dense.route(logits, routing_rule(rule)))


@pytest.fixture(params=[NativeKernels, ReferenceKernels], ids=["native", "reference"])
def dense(request):
    """Each implementation of the rules."""
    return request.param().dense


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("used", [1, 3, 8])
def test_softmax_over_all_then_top_k(dense, normalize, used):
    """Probabilities come from all experts; the chosen are the best, best first."""
    logits = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32) * 3
    routing = route(dense, logits, RouterRule(8, used, normalize_top_k=normalize))
    for token in range(5):
        p = np.exp(logits[token].astype(np.float64))
        p /= p.sum()
        best = sorted(range(8), key=lambda e: -p[e])[:used]
        assert routing.expert_ids[token].tolist() == best
        expected = p[best] / (p[best].sum() if normalize else 1)
        np.testing.assert_allclose(routing.weights[token], expected, rtol=1e-6)


def test_ties_go_to_the_lower_index(dense):
    """Equal logits choose the first experts, as a stable rule must."""
    routing = route(dense, np.zeros((1, 6), np.float32), RouterRule(6, 3, normalize_top_k=True))
    assert routing.expert_ids.tolist() == [[0, 1, 2]]


def test_the_scale_multiplies_the_weights(dense):
    """expert_weights_scale comes after normalising."""
    rule = RouterRule(4, 2, normalize_top_k=True, scale=2.5)
    routing = route(dense, np.arange(4, dtype=np.float32)[None], rule)
    np.testing.assert_allclose(routing.weights.sum(), 2.5, rtol=1e-6)


def test_huge_logits_do_not_overflow(dense):
    """The softmax is shifted by its maximum."""
    logits = np.array([[1e30, 0.0, -1e30]], np.float32)
    routing = route(dense, logits, RouterRule(3, 2, normalize_top_k=True))
    np.testing.assert_array_equal(routing.weights, [[1.0, 0.0]])


def test_the_rotary_table_grows_and_keeps_what_it_had(dense):
    """Rows of any positions, in any order, equal a table made for them; growing changes no row."""
    table = RotaryTable(dense, RopeRule(8, 10000.0))
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    for positions in ([0, 5], [1023], [4000, 3, 1024], []):
        wanted = np.array(positions, np.int32)
        rows, expected = table.at(wanted), dense.rope_table(wanted, frequencies)
        np.testing.assert_array_equal(rows.cosines, expected.cosines)
        np.testing.assert_array_equal(rows.sines, expected.sines)
