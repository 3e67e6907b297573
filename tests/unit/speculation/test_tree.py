"""Trees of guesses: those that the method's authors build, and of each budget the likeliest."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.support.toy_dflash import GOLDEN_AUTHORS, tree_cases
from thermocline.speculation.tree import best_of_each, best_tree


def test_trees_are_the_authors():
    """Of 1,000 random logits: the same nodes in the same order."""
    golden = np.load(GOLDEN_AUTHORS)
    tokens, parents, sizes = (golden[f"tree {name}"] for name in ("tokens", "parents", "sizes"))
    start = 0
    for (logits, budget), size in zip(tree_cases(), sizes.tolist(), strict=True):
        tree = best_tree(*best_of_each(logits, budget), budget)
        end = start + size
        assert list(tree.tokens) == tokens[start:end].tolist()
        assert list(tree.parents) == parents[start:end].tolist()
        start = end
    assert start == len(tokens)


@pytest.mark.parametrize("budget", [1, 2, 7, 20])
def test_nodes_are_the_likeliest_beginnings(budget):
    """Against all of them: three places with five tokens each."""
    rng = np.random.default_rng(budget)
    log_probs = -np.sort(rng.exponential(size=(3, 5)), axis=1).astype(np.float32)
    tokens = np.arange(15).reshape(3, 5)
    tree = best_tree(tokens, log_probs, budget)
    every = [float(log_probs[0, a]) for a in range(5)]
    every += [float(log_probs[0, a] + log_probs[1, b]) for a in range(5) for b in range(5)]
    every += [
        float(log_probs[0, a] + log_probs[1, b] + log_probs[2, c])
        for a in range(5)
        for b in range(5)
        for c in range(5)
    ]
    assert np.allclose(tree.log_probs, sorted(every, reverse=True)[:budget], atol=1e-5)
    assert all(first >= second - 1e-6 for first, second in pairwise(tree.log_probs))
    assert all(parent < index for index, parent in enumerate(tree.parents))


def test_nothing_to_guess_is_no_tree():
    """No place, and no room."""
    nothing, one = np.empty((0, 3), np.float32), np.zeros((1, 1), np.float32)
    assert best_tree(nothing.astype(np.int64), nothing, 4).tokens == ()
    assert best_tree(one.astype(np.int64), one, 0).tokens == ()


@pytest.mark.parametrize("count", [1, 3, 50, 60])
def test_the_best_of_each_place(count):
    """As a softmax in double has them, with equals in order."""
    rng = np.random.default_rng(count)
    logits = rng.standard_normal((6, 50)).astype(np.float32) * 4
    logits[2, 7:30] = logits[2].max()
    tokens, log_probs = best_of_each(logits, count)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    order = np.argsort(-wide, axis=1, kind="stable")[:, :count]
    assert tokens.tolist() == order.tolist()
    assert np.allclose(log_probs, np.take_along_axis(expected, order, axis=1), atol=1e-5)
