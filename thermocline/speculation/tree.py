"""Trees of guesses from independent guesses of each place: the most likely beginnings, best first. Pure.

The method of DDTree (arXiv 2604.12989): a drafter that guesses all places at once says how likely each token is at each
place, whatever stands before it. The tree of so many nodes that catches the most is that of the likeliest beginnings.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.messages import FloatArray


@dataclass(frozen=True, slots=True)
class GuessTree:
    """Nodes, the likeliest first, so parents before their children; parents has -1 for the root, which is no node.

    log_probs: natural logarithm of how likely a node and all before it are right.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]


def best_tree(tokens: NDArray[np.int64], log_probs: FloatArray, budget: int) -> GuessTree:
    """Return the tree of at most `budget` nodes that are likeliest.

    tokens, log_probs: [places, ranks], of each place its likeliest tokens, the best first. Of equals the one whose ranks
    come first is taken first.
    """
    places, ranks = log_probs.shape
    found: list[tuple[int, int, float]] = []
    # (-log-probability, ranks on the way, parent): what may be the next node. Each stands for its own further siblings.
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if places and ranks and budget > 0:
        heap.append((-float(log_probs[0, 0]), (0,), -1))
    while heap and len(found) < budget:
        cost, way, parent = heapq.heappop(heap)
        place, rank, total = len(way) - 1, way[-1], -cost
        index = len(found)
        found.append((int(tokens[place, rank]), parent, total))
        if rank + 1 < ranks:
            sibling = total - float(log_probs[place, rank]) + float(log_probs[place, rank + 1])
            heapq.heappush(heap, (-sibling, (*way[:-1], rank + 1), parent))
        if place + 1 < places:
            child = total + float(log_probs[place + 1, 0])
            heapq.heappush(heap, (-child, (*way, 0), index))
    return GuessTree(
        tuple(token for token, _, _ in found),
        tuple(parent for _, parent, _ in found),
        tuple(total for _, _, total in found),
    )


def best_of_each(logits: FloatArray, count: int) -> tuple[NDArray[np.int64], FloatArray]:
    """Return the `count` likeliest tokens of each row of logits [places, V], the best first, and their log-probabilities.

    Of equals the lower token comes first.
    """
    count = min(count, logits.shape[1])
    bound = np.partition(logits, -count, axis=1)[:, -count]
    tokens = np.empty((len(logits), count), np.int64)
    for row, least in enumerate(bound):
        there = np.flatnonzero(logits[row] >= least)
        order = np.argsort(-logits[row, there], kind="stable")[:count]
        tokens[row] = there[order]
    best = np.take_along_axis(logits, tokens, axis=1)
    highest = best[:, :1]
    sums = np.exp(logits - highest, dtype=np.float32).sum(axis=1, keepdims=True, dtype=np.float64)
    return tokens, (best - highest - np.log(sums)).astype(np.float32)
