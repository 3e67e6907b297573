"""The slow twin of the router, in NumPy: which experts a token goes to, and with what weight.

Owns the rule that every other implementation follows. Knows no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.dense_contract import NEAR_BEST_RANGE, Gating

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.dense_contract import RoutingRule
    from thermocline.kernels.weight import FloatArray, IntArray


def route(
    logits: FloatArray, rule: RoutingRule, given: IntArray | None = None
) -> tuple[IntArray, FloatArray]:
    """See `DenseKernels.route`. Computes in double."""
    wide = logits.astype(np.float64)
    chosen = _best(wide, rule) if given is None else given
    weights = _weights(_biased(wide, rule), chosen, rule.gating)
    if rule.normalize:
        weights /= np.maximum(weights.sum(axis=-1, keepdims=True), rule.min_sum)
    weights *= rule.scale
    return np.array(chosen, np.int32), weights.astype(np.float32)


def _best(logits: NDArray[np.floating], rule: RoutingRule) -> NDArray[np.integer]:
    scores = _choice_scores(logits, rule)
    return np.argsort(-scores, axis=-1, kind="stable")[:, : rule.chosen]


def _choice_scores(logits: NDArray[np.floating], rule: RoutingRule) -> NDArray[np.floating]:
    """Return numbers [tokens, experts] whose best `rule.chosen` are the experts that logits choose."""
    scores = _biased(logits, rule)
    if rule.gating is Gating.SIGMOID:
        scores = sigmoid(scores)
    elif rule.gating is Gating.SQRT_SOFTPLUS:
        scores = _sqrt_softplus(scores)
    elif rule.gating is Gating.SOFTMAX and (rule.bias is not None or rule.groups > 1):
        scores = _softmax(scores)
    if rule.bias is not None:
        scores = scores + rule.bias
    return scores if rule.groups == 1 else _best_groups(scores, rule)


def sigmoid(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return 1 / (1 + e^-x), in double."""
    with np.errstate(over="ignore"):
        factor: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x.astype(np.float64)))
    return factor


def _sqrt_softplus(x: NDArray[np.floating]) -> NDArray[np.float64]:
    roots: NDArray[np.float64] = np.sqrt(np.logaddexp(0.0, x))
    return roots


def _biased(logits: NDArray[np.floating], rule: RoutingRule) -> NDArray[np.floating]:
    return logits if rule.logit_bias is None else logits + rule.logit_bias


def _softmax(x: NDArray[np.floating]) -> NDArray[np.floating]:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: NDArray[np.floating] = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return shares


def _weights(
    logits: NDArray[np.floating], chosen: NDArray[np.integer], gating: Gating
) -> NDArray[np.floating]:
    match gating:
        case Gating.SOFTMAX:
            return np.take_along_axis(_softmax(logits), chosen, axis=-1)
        case Gating.SIGMOID:
            return sigmoid(np.take_along_axis(logits, chosen, axis=-1))
        case Gating.SQRT_SOFTPLUS:
            return _sqrt_softplus(np.take_along_axis(logits, chosen, axis=-1))
        case Gating.SOFTMAX_CHOSEN:
            return _softmax(np.take_along_axis(logits, chosen, axis=-1))
        case Gating.NEAR_BEST:
            return _near_shares(logits, chosen)


def _near_shares(logits: NDArray[np.floating], chosen: NDArray[np.integer]) -> NDArray[np.floating]:
    """Return the weights [tokens, chosen] of `Gating.NEAR_BEST`."""
    left, shares = logits.copy(), np.empty(chosen.shape)
    for place in range(chosen.shape[1]):
        own = np.take_along_axis(logits, chosen[:, place : place + 1], axis=-1)
        is_far = own - left > NEAR_BEST_RANGE * np.maximum(np.abs(left), own)
        near = np.where(is_far, -np.inf, left)
        shares[:, place] = 1.0 / np.exp(near - own).sum(axis=-1)
        np.put_along_axis(left, chosen[:, place : place + 1], -np.inf, axis=-1)
    return shares


def _best_groups(scores: NDArray[np.floating], rule: RoutingRule) -> NDArray[np.floating]:
    """Return the scores, minus infinity for experts outside of the best groups."""
    by_group = scores.reshape(len(scores), rule.groups, -1)
    totals = np.sort(by_group, axis=-1)[..., -rule.group_best :].sum(axis=-1)
    worse = np.argsort(-totals, axis=-1, kind="stable")[:, rule.groups_used :]
    kept = by_group.copy()
    np.put_along_axis(kept, worse[..., None], -np.inf, axis=1)
    return kept.reshape(scores.shape)
