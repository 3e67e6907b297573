"""A model's dimensions and rules as plain numbers, read from metadata. Knows no tensor data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.weight import ExpertActivation
from thermocline.messages import LayerIndex, Pooling

if TYPE_CHECKING:
    from thermocline.kernels.delta_contract import DeltaShape
    from thermocline.kernels.recurrent_contract import MambaShape, ShortConvShape, StateShape
    from thermocline.models.rope import RopeRule, RopeScaling


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

    def used_of(self, amount: int) -> int:
        """Return how much of what all routed experts have a token uses."""
        return amount * self.num_experts_used // self.num_experts if self.num_experts else 0


NO_EXPERTS: Final = RouterRule(0, 0, normalize_top_k=False)
"""The rule of a model without routed experts."""


class LayerKind(StrEnum):
    """How a layer looks at earlier tokens."""

    ATTENTION = "attention"
    WINDOW = "sliding window"
    RECURRENT = "recurrent state"
    NONE = "none"
    """It is a feed-forward alone."""


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """How layers with a sliding window differ from the others."""

    num_tokens: int
    """How many last positions a token sees, its own included."""
    rope: RopeRule


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention, whose heads share one cached row per token."""

    rank: int
    """Numbers of a row that values are made of; those behind them are turned."""
    query_rank: int
    """Numbers between the two matrices of queries; 0 where there is one matrix."""
    key_dim: int
    """Of one head, with what is turned."""
    value_dim: int
    turned: int

    @property
    def plain(self) -> int:
        """Numbers of a head's key that are not turned."""
        return self.key_dim - self.turned

    @property
    def expanded_tokens(self) -> int:
        """Return how many tokens of a prompt attend together in the expanded form; 0 where that never pays.

        Keys and values of a position cost rank * (plain + value_dim) multiplications per head, and then each pair of
        a token and a position this much less than in the absorbed form. A power of two of at least twice the tokens
        for which both cost the same: 512 in DeepSeek and Kimi, 1024 in GLM-4.7-Flash.
        """
        saved = 2 * self.rank - self.plain - self.value_dim
        if saved <= 0:
            return 0
        even = self.rank * (self.plain + self.value_dim) / saved
        return 1 << math.ceil(math.log2(2 * even))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's dimensions. Sizes are element counts."""

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
    own_dense_layers: tuple[int, ...] = ()
    """All layers without routed experts, where they are not the first ones."""
    expert_activation: ExpertActivation = ExpertActivation.SILU
    """What routed experts compute."""
    own_expert_hidden_size: int = 0
    """Width of what routed experts take and give; 0 is the hidden size."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token takes; 0 where there is none."""
    own_layer_kinds: tuple[LayerKind, ...] = ()
    """By layer; none where every layer is plain attention."""

    own_rotary_dims: int | None = None
    """How many first dimensions of a head turn; None is all."""
    rope_scaling: RopeScaling | None = None
    """How layers with full attention scale their rotary embedding."""
    window: WindowSpec | None = None
    layer_heads: tuple[int, ...] = ()
    """Heads by layer, where they differ; num_heads is the most."""
    own_kv_shapes: tuple[HeadShape, ...] = ()
    """Heads of keys and values by layer, where they differ; alike in all layers of a kind."""
    dense_intermediate_size: int = 0
    """Width of the feed-forward of layers without routed experts."""
    num_predict_layers: int = 0
    """Blocks after the last layer that predict further tokens; they are left out."""
    recurrent: DeltaShape | ShortConvShape | MambaShape | None = None
    logit_softcap: float = 0.0
    """Logits become softcap * tanh(logit / softcap); 0 leaves them."""
    """What recurrent layers compute."""
    output_norm: str = "output_norm.weight"
    """The tensor of the last norm's gains."""
    latent: LatentSpec | None = None
    """How layers attend where heads share one cached row, of head_dim numbers."""
    own_attention_scale: float | None = None
    """What attention scores are multiplied with; None is the usual 1 / sqrt(head_dim)."""
    embedding_scale: float = 1.0
    """The factor on embedded tokens."""
    residual_scale: float = 1.0
    """The factor on what attention and the feed-forward add to the residual stream."""
    logit_scale: float = 1.0
    """The factor on logits."""

    own_pooling: Pooling | None = None
    """How the file says that embeddings are made."""

    @property
    def pooling(self) -> Pooling:
        """How embeddings are made: by the last token's state unless the file names another way."""
        return self.own_pooling or Pooling.LAST

    @property
    def has_experts(self) -> bool:
        """Whether any layer has routed experts."""
        return self.router.num_experts > 0

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """How each layer looks at earlier tokens."""
        return self.own_layer_kinds or (LayerKind.ATTENTION,) * self.num_layers

    @property
    def state(self) -> StateShape | None:
        """What a recurrent layer keeps of a sequence; None without such layers."""
        return None if self.recurrent is None else self.recurrent.state

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values by layer."""
        return (
            self.own_kv_shapes or (HeadShape(self.num_kv_heads, self.head_dim),) * self.num_layers
        )

    def at(self, index: int) -> ModelSpec:
        """Return the dimensions with the heads of one layer as everyone's."""
        heads, shape = self.layer_heads, self.kv_shapes[index]
        return replace(
            self,
            num_heads=heads[index] if heads else self.num_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
        )

    @property
    def expert_hidden_size(self) -> int:
        """Width of what routed experts take and give."""
        return self.own_expert_hidden_size or self.hidden_size

    @property
    def rotary_dims(self) -> int:
        """How many first dimensions of a head turn."""
        return self.head_dim if self.own_rotary_dims is None else self.own_rotary_dims

    @property
    def dense_layers(self) -> frozenset[int]:
        """Layers without routed experts."""
        return frozenset(self.own_dense_layers or range(self.num_dense_layers))

    @property
    def keyless_layers(self) -> tuple[LayerIndex, ...]:
        """Layers that keep no keys and values: recurrent ones, and those without a mixer."""
        return tuple(sorted((*self.recurrent_layers, *self._layers_of(LayerKind.NONE))))

    @property
    def recurrent_layers(self) -> tuple[LayerIndex, ...]:
        """Layers with recurrent state instead of keys and values."""
        return self._layers_of(LayerKind.RECURRENT)

    @property
    def window_layers(self) -> tuple[LayerIndex, ...]:
        """Layers whose tokens see only the last ones."""
        return self._layers_of(LayerKind.WINDOW)

    @property
    def cpu_only(self) -> str:
        """What of its layers no device computes yet, so that their non-expert weights stay on the CPU; "" for nothing."""
        return "products around experts" if self.expert_hidden_size != self.hidden_size else ""

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied with."""
        own = self.own_attention_scale
        return math.pow(self.head_dim, -0.5) if own is None else own

    def _layers_of(self, wanted: LayerKind) -> tuple[LayerIndex, ...]:
        kinds = enumerate(self.layer_kinds)
        return tuple(LayerIndex(index) for index, kind in kinds if kind is wanted)
