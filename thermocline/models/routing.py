"""Which experts a token goes to, and with what weight: a model's rule in the kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from thermocline.kernels.dense_contract import RoutingRule

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import Centering
    from thermocline.kernels.stream_weights import AnyMixer
    from thermocline.kernels.weight import FloatArray, IntArray, Weight
    from thermocline.messages import LayerEnding, Routing
    from thermocline.models.router_rule import RouterRule

# The sum of the chosen weights is not allowed below the smallest normal half, as in llama.cpp.
_MIN_WEIGHT_SUM = 6.103515625e-5


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """What one layer's router decides by. gain: float32 [D], of the norm before it, None without one; matrix: [E, D].

    centering: of that norm, where it takes the mean off first. mixer: what makes its input of several residual streams. by_token: see
    `MoeWeights`.
    """

    gain: FloatArray | None
    matrix: Weight
    epsilon: float
    rule: RoutingRule
    centering: Centering | None = None
    mixer: AnyMixer | None = None
    by_token: IntArray | None = None


class Routed(NamedTuple):
    """What a layer's routing gives. residual: float32 [T, D], to which the routed experts are added; x:
    float32 [T, D], their input. ending: see `LayerWork`.
    """

    residual: FloatArray
    x: FloatArray
    routing: Routing
    ending: LayerEnding | None = None


def routing_rule(
    rule: RouterRule, bias: FloatArray | None = None, logit_bias: FloatArray | None = None
) -> RoutingRule:
    """Return the rule as kernels take it. bias, logit_bias: float32 [E], see `RoutingRule`."""
    return RoutingRule(
        rule.num_experts_used,
        rule.normalize_top_k,
        _MIN_WEIGHT_SUM,
        rule.scale,
        rule.gating,
        bias,
        logit_bias,
        rule.num_groups,
        rule.num_groups_used,
        rule.group_best,
    )
