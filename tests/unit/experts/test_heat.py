"""Counts of chosen experts: exact ones, and ones that fade by half every so many tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermocline.experts.heat import ExpertHeat, HeatRecord, layer_use
from thermocline.messages import LayerIndex, Routing


def routing(*rows: tuple[int, ...]) -> Routing:
    ids = np.array(rows, np.int32)
    return Routing(ids, np.ones(ids.shape, np.float32))


def test_counts_are_exact():
    """Whatever fades, the choices since the start are all there."""
    heat = ExpertHeat(2, 4, half_life_tokens=1)
    for _ in range(50):
        heat.record(LayerIndex(0), routing((0, 3)))
        heat.record(LayerIndex(1), routing((1, 2), (1, 3), (1, 0)))
    assert heat.counts().tolist() == [[50, 0, 0, 50], [50, 150, 50, 50]]
    assert heat.known().num_tokens == 150


def test_layers_without_experts_stay_cold():
    """A dense layer records nothing."""
    heat = ExpertHeat(1, 4)
    heat.record(LayerIndex(0), Routing(np.empty((3, 0), np.int32), np.empty((3, 0), np.float32)))
    assert not heat.known().warmth.any()


def test_repeats_are_what_the_token_before_chose_too():
    """In any place of its row, of consecutive tokens, of the first 65 of them; a layer that nobody saw has none."""
    heat = ExpertHeat(3, 4)
    rows = np.array([(0, 1), (1, 2), (2, 1), (3, 0)], np.int32)
    heat.record_repeats(LayerIndex(0), rows)
    heat.record_repeats(LayerIndex(0), rows[:1])
    heat.record_repeats(LayerIndex(1), np.zeros((100, 1), np.int32))
    heat.record_repeats(LayerIndex(2), np.empty((9, 0), np.int32))
    assert heat.known().repeats.tolist() == [[3, 6], [64, 64], [0, 0]]
    assert heat.known().repeat_shares() == (0.5, 1.0, 0.0)
    assert ExpertHeat(3, 4).known().repeat_shares() is None


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=200), min_size=1, max_size=20),
    st.integers(1, 2000),
)
def test_a_choice_fades_by_half_in_a_half_life(chunks, half_life):
    """Between the sums that count a chunk's choices, or those of a 64th of the half-life, alike or by the token."""
    heat = ExpertHeat(1, 4, half_life)
    exact = np.zeros(4)
    for chunk in chunks:
        heat.record(LayerIndex(0), routing(*((expert,) for expert in chunk)))
        for expert in chunk:
            exact *= 0.5 ** (1 / half_life)
            exact[expert] += 1
    coarse = 0.5 ** -((half_life // 64 + max(map(len, chunks)) + 1) / half_life)
    found = heat.known().warmth[0]
    assert (exact * (1 - 1e-9) <= found).all()
    assert (found <= exact * coarse * (1 + 1e-9)).all()


def test_reading_changes_nothing():
    """However often somebody looks."""
    watched, alone = ExpertHeat(1, 4, 100), ExpertHeat(1, 4, 100)
    for expert in (0, 1, 1, 3) * 30:
        for heat in (watched, alone):
            heat.record(LayerIndex(0), routing((expert,)))
        watched.known()
    assert watched.known().warmth.tolist() == alone.known().warmth.tolist()


def test_what_follows_counts_more():
    """What was known fades by the tokens that came since."""
    before = HeatRecord(np.array([[8.0, 0.0]]), 1000, 100)
    later = HeatRecord(np.array([[1.0, 5.0]]), 200, 100)
    both = before.followed_by(later)
    assert both.warmth.tolist() == [[3.0, 5.0]]
    assert (both.num_tokens, both.half_life_tokens) == (1200, 100)


def test_what_came_since_completes_what_was_known():
    """A record is what was known before, followed by what came since; also where one layer was behind in between."""
    heat, rng, parts = ExpertHeat(2, 4, 50), np.random.default_rng(2), []
    for num_tokens in (30, 1, 170, 0, 60):
        for layer in range(2):
            if layer == 1:
                parts.append(heat.known())
            heat.record(LayerIndex(layer), routing(*rng.integers(0, 4, (num_tokens, 1)).tolist()))
    whole = heat.known()
    for before in parts:
        both = before.followed_by(whole.since(before))
        np.testing.assert_allclose(both.warmth, whole.warmth, atol=1e-9)
        assert both.num_tokens == whole.num_tokens == 261
    assert not whole.since(whole).warmth.any()


def test_the_use_of_a_layer_in_figures():
    """Even use: a quarter takes a quarter, at full entropy. One favourite takes all, at none."""
    even = layer_use(np.full(8, 3.0), 3)
    assert even is not None
    assert (even.top_quarter_share, even.entropy_bits) == (0.25, 3.0)
    assert even.top == ((0, 0.125), (1, 0.125), (2, 0.125))
    one = layer_use(np.array([0.0, 5.0, 0.0, 0.0]), 3)
    assert one is not None
    assert (one.top, one.top_quarter_share, one.entropy_bits) == (((1, 1.0),), 1.0, 0.0)
    skewed = layer_use(np.array([1.0, 1.0, 2.0, 4.0]), 1)
    assert skewed is not None
    assert (skewed.top_quarter_share, skewed.entropy_bits) == pytest.approx((0.5, 1.75))
    assert layer_use(np.zeros(4), 3) is None
