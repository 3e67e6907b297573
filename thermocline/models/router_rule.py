"""How a router chooses a token's experts, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from thermocline.kernels.dense_contract import Gating


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How router logits become routing weights."""

    num_experts: int
    num_experts_used: int
    normalize_top_k: bool
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """Multiplies the chosen weights at the end."""
    gating: Gating = Gating.SOFTMAX
    num_groups: int = 1
    """Experts lie in so many groups of equal size."""
    num_groups_used: int = 1
    """Only experts of the best groups are chosen from."""
    group_best: int = 2
    """A group is judged by the sum of so many of its best experts: one or two."""
    own_used: tuple[int, ...] = ()
    """By layer, how many experts a token uses, where that differs; num_experts_used is the most."""

    def at(self, layer: int) -> RouterRule:
        """Return the rule with the number of one layer as everyone's."""
        if layer >= len(self.own_used):  # everyone's, also of blocks behind the last layer
            return self
        return replace(self, num_experts_used=self.own_used[layer], own_used=())

    @property
    def typical_used(self) -> int:
        """How many experts a token uses of a layer on average, rounded."""
        counts = [count for count in self.own_used if count]
        return round(sum(counts) / len(counts)) if counts else self.num_experts_used

    def used_of(self, amount: int, layer: int) -> int:
        """Return how much of what all routed experts of a layer have a token uses."""
        used = self.at(layer).num_experts_used
        return amount * used // self.num_experts if self.num_experts else 0


NO_EXPERTS: Final = RouterRule(0, 0, normalize_top_k=False)
"""The rule of a model without routed experts."""
