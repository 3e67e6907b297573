"""A model's dimensions and rules as plain numbers, read from metadata. Knows no tensor data."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How router logits become routing weights."""

    num_experts: int
    num_experts_used: int
    normalize_top_k: bool
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """Multiplies the chosen weights at the end."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model is. Sizes are element counts."""

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_base: float
    rms_epsilon: float
    expert_intermediate_size: int
    router: RouterRule

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied with."""
        return math.pow(self.head_dim, -0.5)
