"""Guesses which experts the next layers of a decode step will select. Pure: NumPy in, ids out.

Two guesses: the next layer's router on the present hidden state, and the experts that the layer used
lately. Both are scored against what was selected, the second also where it is not the one acted upon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import FloatArray, IntArray, LayerIndex
    from thermocline.models.routing import RouterWeights

# An expert's recent use counts half after about seven tokens.
_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """How good the guesses for one layer were, in experts over all decode steps.

    recall = total_correct / total_selected; precision = total_correct / total_predicted. The recency
    guess names as many experts as were selected, so that its recall is its precision.
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
    """Predicts the layers behind a step, and keeps the score."""

    def __init__(self, routers: Sequence[RouterWeights], num_experts: int) -> None:
        self._routers = tuple(routers)
        shape = (len(self._routers), num_experts)
        self._recent = np.zeros(shape, np.float32)
        self._guesses: dict[int, IntArray] = {}
        self._totals = np.zeros((len(self._routers), 4), np.int64)

    def observe(self, layer: LayerIndex, selected: IntArray) -> None:
        """Score the open guess for `layer` against the experts that it selected, ascending int32."""
        guess = self._guesses.pop(layer, None)
        totals = self._totals[layer]
        totals[0] += len(selected)
        if guess is not None:
            totals[1] += len(guess)
            totals[2] += len(np.intersect1d(guess, selected, assume_unique=True))
        recent = self.recent(layer, len(selected))
        totals[3] += len(np.intersect1d(recent, selected, assume_unique=True))
        self._recent[layer] *= _DECAY
        self._recent[layer, selected] += 1.0

    def predict(self, layer: LayerIndex, residual: FloatArray) -> IntArray:
        """Return `layer`'s likely experts from an earlier layer's residual stream [T, D].

        Of several guesses for a layer the latest is scored: it saw the nearest hidden state.
        """
        experts = likely_experts(self._routers[layer], residual)
        self._guesses[layer] = experts
        return experts

    def recent(self, layer: LayerIndex, count: int) -> IntArray:
        """Return the `count` experts that `layer` used most of late; fewer if fewer were used."""
        recent = self._recent[layer]
        best = np.argpartition(-recent, min(count, len(recent)) - 1)[:count]
        return best[recent[best] > 0].astype(np.int32)

    def scores(self) -> tuple[LayerPrediction, ...]:
        """Return every layer's score since the start."""
        return tuple(
            LayerPrediction(layer, *(int(total) for total in totals))
            for layer, totals in enumerate(self._totals)
        )


def likely_experts(router: RouterWeights, residual: FloatArray) -> IntArray:
    """Return the experts, ascending int32, that `router` chooses for any row of residual [T, D]."""
    power = np.einsum("td,td->t", residual, residual) / residual.shape[1]
    normed = residual * (router.gain / np.sqrt(power + router.epsilon)[:, None])
    # einsum, not matmul: it stays on this thread, where BLAS would wake its own.
    logits = np.einsum("td,ed->te", normed, router.matrix)
    # The best are the same before and after a softmax.
    best = np.argpartition(-logits, router.num_used - 1, axis=1)[:, : router.num_used]
    return np.unique(best).astype(np.int32)
