"""A model's dimensions and rules as plain numbers, read from metadata. Knows no tensor data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

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


class LayerKind(StrEnum):
    """How a layer looks at earlier tokens."""

    ATTENTION = "attention"
    WINDOW = "sliding window"
    RECURRENT = "recurrent state"


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
    num_dense_layers: int = 0
    """First layers without routed experts."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token takes; 0 where there is none."""
    own_layer_kinds: tuple[LayerKind, ...] = ()
    """By layer; none where every layer is plain attention."""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """How each layer looks at earlier tokens."""
        return self.own_layer_kinds or (LayerKind.ATTENTION,) * self.num_layers

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied with."""
        return math.pow(self.head_dim, -0.5)
