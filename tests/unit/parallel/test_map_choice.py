"""Maps of experts: linear, balanced by what is known, and as text that ranks tell each other."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thermocline.errors import MeshError
from thermocline.parallel.expert_map import linear_map
from thermocline.parallel.map_choice import choose_map, map_text, rank_loads, read_map

SKEWED = np.random.default_rng(3).pareto(1.0, (4, 12)) * 100


def test_what_is_asked_for_is_chosen():
    """Linear stays linear whatever is known; balanced without a known use is linear, and says why."""
    expected = linear_map(4, 12, 3).owner
    for kind, warmth in (("linear", SKEWED), ("balanced", None), ("balanced", np.zeros((4, 12)))):
        experts, reason = choose_map(kind, (4, 12), 3, warmth)
        np.testing.assert_array_equal(experts.owner, expected)
        assert ("not known" in reason) is (kind == "balanced")


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_balanced_map_has_less_on_its_busiest_rank(num_ranks):
    """Every rank holds at most one expert beyond its part, every expert has an owner, and the reason has both figures."""
    experts, reason = choose_map("balanced", (4, 12), num_ranks, SKEWED)
    found = rank_loads(experts, SKEWED, num_ranks)
    neighbours = rank_loads(linear_map(4, 12, num_ranks), SKEWED, num_ranks)
    np.testing.assert_allclose(found.sum(axis=1), SKEWED.sum(axis=1))
    assert found.max(axis=1).mean() < neighbours.max(axis=1).mean()
    held = np.array([(experts.owner == rank).any(axis=2).sum(axis=1) for rank in range(num_ranks)])
    assert held.max() <= -(-12 // num_ranks) + 1
    ratio = (found.max(axis=1) / found.mean(axis=1)).mean()
    assert f"{ratio:.2f} of the mean" in reason


def test_layers_without_a_known_use_do_not_count_in_the_reason():
    """A dense first layer has no choices: its ranks are even, and would hide the others."""
    warmth = np.vstack([np.zeros((1, 12)), SKEWED])
    _, with_dense = choose_map("balanced", (5, 12), 2, warmth)
    _, without = choose_map("balanced", (4, 12), 2, SKEWED)
    assert with_dense == without


def test_a_map_travels_as_text():
    """What is read is what was told, copies included."""
    experts, _ = choose_map("balanced", (4, 12), 3, SKEWED)
    assert experts.owner.shape[2] > 1, "the case has copies"
    read = read_map(map_text(experts), (4, 12), 3)
    assert read.owner.dtype == np.int32
    np.testing.assert_array_equal(read.owner, experts.owner)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}",
        '["a"]',
        "[[[0.5]]]",
        "[[[0],[1]],[[0]]]",
        json.dumps([[[0], [1]]] * 2),
        json.dumps([[[0], [2], [0]]] * 2),
        json.dumps([[[0], [-2], [0]]] * 2),
        json.dumps([[[0], [-1], [0]]] * 2),
        "[" * 100_000,
    ],
)
def test_what_is_no_map_is_a_typed_error(text):
    """Another shape, ranks that there are not, an expert of nobody, or no JSON at all."""
    with pytest.raises(MeshError, match="start all ranks with the same version"):
        read_map(text, (2, 3), 2)
