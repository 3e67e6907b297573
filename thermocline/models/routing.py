"""Which experts a token goes to, and with what weight: one function per rule. Pure NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import Routing

if TYPE_CHECKING:
    from thermocline.kernels.contract import FloatArray
    from thermocline.models.spec import RouterRule

# The sum of the chosen weights is not allowed below the smallest normal half, as in llama.cpp.
_MIN_WEIGHT_SUM = 6.103515625e-5


def route_softmax(logits: FloatArray, rule: RouterRule) -> Routing:
    """Softmax over all experts, then the best K of each token, best first, ties to the lower index.

    logits: float32 [T, E].
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    chosen = order[:, : rule.num_experts_used]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)
    if rule.normalize_top_k:
        weights /= np.maximum(weights.sum(axis=-1, keepdims=True), _MIN_WEIGHT_SUM)
    weights *= rule.scale
    return Routing(np.ascontiguousarray(chosen, np.int32), weights.astype(np.float32))
