"""Which experts a token goes to, and with what weight: a model's rule in the kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import SoftmaxRule

if TYPE_CHECKING:
    from thermocline.kernels.contract import FloatArray
    from thermocline.models.spec import RouterRule

# The sum of the chosen weights is not allowed below the smallest normal half, as in llama.cpp.
_MIN_WEIGHT_SUM = 6.103515625e-5


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """What one layer's router decides by. gain: float32 [D], of the norm before it; matrix: float32 [E, D]."""

    gain: FloatArray
    matrix: FloatArray
    epsilon: float
    num_used: int
    """Experts per token."""


def softmax_rule(rule: RouterRule) -> SoftmaxRule:
    """Return the rule as kernels take it: softmax over all experts, then the best of each token."""
    return SoftmaxRule(rule.num_experts_used, rule.normalize_top_k, _MIN_WEIGHT_SUM, rule.scale)
