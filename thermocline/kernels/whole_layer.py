"""What a whole layer takes as one native job, for few tokens; the same parts apart are its slow twin.

Knows no model: a layer is its weights and its rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.contract import ExpertStack, FloatArray, IntArray, Weight
    from thermocline.kernels.dense_contract import (
        HeadNorm,
        LayerCache,
        RopeTable,
        SoftmaxRule,
        TokenRun,
    )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """One layer's grouped-query attention. norm: float32 [hidden], with head_norm's epsilon.

    scale: what scores are multiplied by.
    """

    norm: FloatArray
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    head_norm: HeadNorm
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The weights and rules of one layer whose feed-forward is routed experts alone.

    router_norm: float32 [hidden], with the epsilon of the attention's norms.
    """

    attention: AttentionWeights
    router_norm: FloatArray
    router: Weight
    rule: SoftmaxRule
    experts: ExpertStack


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A chunk on its way through a layer. x: float32 [T, hidden]; positions, slots: int32 [T]."""

    x: FloatArray
    positions: IntArray
    slots: IntArray
    rope: RopeTable
    runs: Sequence[TokenRun]
    cache: LayerCache
    is_prompt: bool


class WholeLayer(Protocol):
    """Attention, routing and all chosen experts at once, with the bits of the parts."""

    def __call__(
        self, parts: LayerParts, given: LayerInput
    ) -> tuple[FloatArray, IntArray, FloatArray]:
        """Return x after the layer, and the experts that were chosen with their weights.

        float32 [T, hidden]; int32 and float32 [T, chosen], best first. Appends to given.cache.
        """
        ...
