"""Routing rules and the shared dense layers against formulas written out."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.models.layers import RotaryTable, rms_norm
from thermocline.models.routing import route_softmax
from thermocline.models.spec import RouterRule


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("used", [1, 3, 8])
def test_softmax_over_all_then_top_k(normalize, used):
    """Probabilities come from all experts; the chosen are the best, best first."""
    logits = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32) * 3
    routing = route_softmax(logits, RouterRule(8, used, normalize_top_k=normalize))
    for token in range(5):
        p = np.exp(logits[token].astype(np.float64))
        p /= p.sum()
        best = sorted(range(8), key=lambda e: -p[e])[:used]
        assert routing.expert_ids[token].tolist() == best
        expected = p[best] / (p[best].sum() if normalize else 1)
        np.testing.assert_allclose(routing.weights[token], expected, rtol=1e-6)


def test_ties_go_to_the_lower_index():
    """Equal logits choose the first experts, as a stable rule must."""
    routing = route_softmax(np.zeros((1, 6), np.float32), RouterRule(6, 3, normalize_top_k=True))
    assert routing.expert_ids.tolist() == [[0, 1, 2]]


def test_the_scale_multiplies_the_weights():
    """expert_weights_scale comes after normalising."""
    rule = RouterRule(4, 2, normalize_top_k=True, scale=2.5)
    routing = route_softmax(np.arange(4, dtype=np.float32)[None], rule)
    np.testing.assert_allclose(routing.weights.sum(), 2.5, rtol=1e-6)


def test_huge_logits_do_not_overflow():
    """The softmax is shifted by its maximum."""
    logits = np.array([[1e30, 0.0, -1e30]], np.float32)
    routing = route_softmax(logits, RouterRule(3, 2, normalize_top_k=True))
    np.testing.assert_array_equal(routing.weights, [[1.0, 0.0]])


def test_rms_norm_is_row_by_row():
    """A row alone equals the row in company, to the bit, and the formula closely."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((7, 300)).astype(np.float32)
    gain = rng.standard_normal(300).astype(np.float32)
    together = rms_norm(x, gain, 1e-6)
    for row in range(7):
        np.testing.assert_array_equal(rms_norm(x[row : row + 1], gain, 1e-6)[0], together[row])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-6)


def test_rotary_turns_pairs_that_lie_half_apart():
    """Dimension i turns with i + half by position * base^(-2i/n); position 0 turns nothing."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 2, 8)).astype(np.float32)
    positions = np.array([0, 1, 1000], np.int32)
    turned = RotaryTable(8, 10000.0).rotate(x, positions)
    np.testing.assert_array_equal(turned[0], x[0])
    for t, position in enumerate(positions):
        for i in range(4):
            angle = float(position) * 10000.0 ** (-2 * i / 8)
            pair = x[t, :, i] + 1j * x[t, :, i + 4]
            expected = pair * np.exp(1j * angle)
            actual = turned[t, :, i] + 1j * turned[t, :, i + 4]
            np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)
