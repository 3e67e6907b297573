"""Predicts which experts the next layers of a decode step will select. Pure: arrays in, ids out.

Two predictions: a layer's router on an earlier layer's hidden state, and the layer's recently used experts. Both are
scored against the selection, and layers that are mostly predicted wrong are not prefetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from thermocline.models.norms import norm_rows
from thermocline.models.streams import narrow

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.contract import Kernels
    from thermocline.messages import FloatArray, IntArray, LayerIndex
    from thermocline.models.routing import RouterWeights

# An expert's recent use counts half after about seven tokens.
_DECAY = 0.9
# A wrong guess takes the disk as long as a right one saves.
_MIN_PRECISION = 0.5
# Before so many experts have been guessed, a layer's precision means nothing.
_MIN_SCORED = 64
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """How good the guesses for one layer were, in experts over the decode steps for which it was guessed.

    recall = total_correct / total_selected; precision = total_correct / total_predicted. The recency
    guess names at most as many experts as were selected. Where no state tells anything (of the next
    token's first layer) it is the only guess, and both counts are its own.
    """

    layer: int
    total_selected: int
    total_predicted: int
    total_correct: int
    total_recency_correct: int

    @property
    def recall(self) -> float:
        """Share of the selected experts that had been predicted."""
        return self.total_correct / self.total_selected if self.total_selected else 0.0

    @property
    def precision(self) -> float:
        """Share of the predicted experts that were selected."""
        return self.total_correct / self.total_predicted if self.total_predicted else 0.0

    @property
    def recency_recall(self) -> float:
        """What the recency guess alone reaches."""
        return self.total_recency_correct / self.total_selected if self.total_selected else 0.0


class Predictor:
    """Predicts layers of a decode step from an earlier one, and keeps the score.

    router_of: a layer's router, asked for when it is first predicted from. kernels: compute its choice on the caller's
    thread, without the interpreter lock, as the layer itself will.
    """

    def __init__(
        self,
        router_of: Callable[[LayerIndex], RouterWeights],
        kernels: Kernels,
        num_layers: int,
        num_experts: int,
    ) -> None:
        self._router_of = cache(router_of)
        self._kernels = kernels
        shape = (num_layers, num_experts)
        self._recent = np.zeros(shape, np.float32)
        self._guesses: dict[int, IntArray] = {}
        self._totals = np.zeros((num_layers, 4), np.int64)

    def observe(self, layer: LayerIndex, selected: IntArray) -> None:
        """Score the open guess for `layer`, if any, against the experts that it selected, ascending int32."""
        guess = self._guesses.pop(layer, None)
        if guess is not None:
            recent, chosen = self._most_used(layer, len(selected)), set(selected.tolist())
            self._totals[layer] += (
                len(selected),
                len(guess),
                len(chosen.intersection(guess.tolist())),
                len(chosen.intersection(recent.tolist())),
            )
        self._recent[layer] *= _DECAY
        self._recent[layer, selected] += 1.0

    def from_state(
        self, layer: LayerIndex, residual: FloatArray, token_ids: IntArray | None = None
    ) -> IntArray:
        """Return `layer`'s likely experts from an earlier layer's residual stream [T, D], or those of the tokens, int32 [T].

        Of several guesses for a layer the latest is scored: it saw the nearest hidden state. Empty while
        guesses for this layer do more harm than good.
        """
        self._guesses[layer] = guess = likely_experts(
            self._router_of(layer), self._kernels, residual, token_ids
        )
        return self._if_worth(layer, guess)

    def from_recency(self, layer: LayerIndex, count: int) -> IntArray:
        """Return the `count` experts that `layer` used most of late, fewer if fewer were used.

        For layers that no state tells anything about. Empty as for `from_state`.
        """
        self._guesses[layer] = guess = self._most_used(layer, count)
        return self._if_worth(layer, guess)

    def _most_used(self, layer: LayerIndex, count: int) -> IntArray:
        recent = self._recent[layer]
        best = np.argpartition(-recent, min(count, len(recent)) - 1)[:count]
        return np.sort(best[recent[best] > 0]).astype(np.int32)

    def _if_worth(self, layer: LayerIndex, guess: IntArray) -> IntArray:
        _, predicted, correct, _ = self._totals[layer]
        is_worth = predicted < _MIN_SCORED or correct >= _MIN_PRECISION * predicted
        return guess if is_worth else _NONE

    def scores(self) -> tuple[LayerPrediction, ...]:
        """Return every layer's score since the start."""
        return tuple(
            LayerPrediction(layer, *(int(total) for total in totals))
            for layer, totals in enumerate(self._totals)
        )


def likely_experts(
    router: RouterWeights,
    kernels: Kernels,
    residual: FloatArray,
    token_ids: IntArray | None = None,
) -> IntArray:
    """Return the experts, ascending int32, that `router` chooses for any row of residual [T, D], or for these tokens [T]."""
    dense, experts = kernels.dense, router.by_token
    if experts is not None and token_ids is not None:
        known: IntArray = np.unique(experts[token_ids])
        return known
    if router.mixer is not None:
        x = narrow(kernels, router.mixer, residual, prompt=False).x
    elif router.gain is not None:
        x = norm_rows(dense, residual, router.gain, router.epsilon, router.centering)
    else:
        x = residual
    ids, _ = dense.route(kernels.matmul(router.matrix, x), router.rule)
    likely: IntArray = np.unique(ids)
    return likely
