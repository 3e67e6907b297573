"""A model's dimensions and rules as plain numbers, read from metadata. Knows no tensor data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.recurrent_contract import StateShape
from thermocline.kernels.weight import ExpertActivation, SiluLimits
from thermocline.messages import LayerIndex, Pooling
from thermocline.models.rope import LongRope

if TYPE_CHECKING:
    from thermocline.kernels.delta_contract import DeltaShape
    from thermocline.kernels.dense_contract import Temperature
    from thermocline.kernels.recurrent_contract import MambaShape, SelectiveShape, ShortConvShape
    from thermocline.models.attention_specs import EntriesSpec, IndexerSpec, LatentSpec, WindowSpec
    from thermocline.models.rope import RopeScaling
    from thermocline.models.router_rule import RouterRule


class LayerKind(StrEnum):
    """How a layer looks at earlier tokens."""

    ATTENTION = "attention"
    WINDOW = "sliding window"
    RECURRENT = "recurrent state"
    NONE = "none"
    """It is a feed-forward alone."""


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Residual streams side by side, of which each part of a layer takes a mixture."""

    count: int
    rank: int = 0
    """Numbers between the two matrices that gate the mixture; 0 where streams are weighed and mixed as wholes."""
    rounds: int = 0
    """How often the matrix that mixes streams is balanced."""
    floor: float = 0.0
    """What is added to weights, and to sums that are divided by, of streams that are mixed as wholes."""
    sums: bool = False
    """Whether the model's end takes a weighed sum of streams without such matrices; else their mean."""
    magnitude: float = 0.0
    """The most, but for the floor, that a stream takes of what a part gives, where streams are not mixed; 0 where they are."""


@dataclass(frozen=True, slots=True)
class NGramSpec:
    """Embeddings of a token with those before it, looked up by hashes and added before one layer."""

    layer: LayerIndex
    """A recurrent one."""
    most_tokens: int
    """Of the longest n-gram, at least two."""
    heads: int
    """Rows of each length."""
    width: int
    """Numbers of a row."""
    conv_width: int
    """Tokens that the convolution sees, each `most_tokens` behind the next."""
    end_token: int
    """Tokens before one with this id are not looked at; it stands for those that there are not."""
    factors: tuple[int, ...]
    """What the hash multiplies tokens with, the latest first."""
    rows: tuple[int, ...]
    """How many rows each head has."""
    firsts: tuple[int, ...]
    """The first row of each head in their table."""

    @property
    def num_heads(self) -> int:
        """Rows that a token takes."""
        return (self.most_tokens - 1) * self.heads

    def state(self, stream_size: int) -> StateShape:
        """The last tokens' numbers before the convolution, and the ids of those that an n-gram may begin with."""
        earlier = (self.conv_width - 1) * self.most_tokens
        return StateShape((earlier, stream_size), (1, 1, self.most_tokens - 1))


@dataclass(frozen=True, slots=True)
class NextBlockSpec:
    """What a block behind the last layer is, where that is not a routed layer that sees all tokens."""

    num_heads: int
    shape: HeadShape
    kind: LayerKind
    dense_size: int
    """Width of its feed-forward; 0 where it has routed experts."""


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
    """What experts compute, and all other feed-forwards."""
    expert_limits: tuple[SiluLimits | None, ...] = ()
    """By block, extra ones included, the limits of routed experts; none where no block has any."""
    shared_limits: tuple[SiluLimits | None, ...] = ()
    """The same of shared experts, and of the feed-forward of layers without routed ones."""
    own_expert_sizes: tuple[int, ...] = ()
    """By layer, the width of routed experts, where they differ; expert_intermediate_size is the largest."""
    own_expert_hidden_size: int = 0
    """Width of what routed experts take and give; 0 is the hidden size."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token takes; 0 where there is none."""
    own_layer_kinds: tuple[LayerKind, ...] = ()
    """By layer; none where every layer is plain attention."""

    own_rotary_dims: int | None = None
    """How many first dimensions of a head turn; None is all."""
    unturned_layers: tuple[int, ...] = ()
    """Layers whose heads do not turn, where the file lists them."""
    rope_scaling: RopeScaling | None = None
    """How layers with full attention scale their rotary embedding."""
    served_tokens: int | None = None
    """The longest sequence that the model was opened for, where that decides about something; None is context_length."""
    window: WindowSpec | None = None
    layer_heads: tuple[int, ...] = ()
    """Heads by layer, where they differ; num_heads is the most."""
    own_kv_shapes: tuple[HeadShape, ...] = ()
    """Heads of keys and values by layer, where they differ; alike in all layers of a kind, but for an indexer's rows."""
    own_kv_sources: tuple[int, ...] = ()
    """By layer, whose keys and values it attends to: its own, or those of an earlier layer of its kind; none where every
    layer has its own."""
    layer_embedding_size: int = 0
    """Width of the embedding that each layer has of each token; 0 without such."""
    dense_intermediate_size: int = 0
    """Width of the feed-forward of layers without routed experts."""
    own_feed_forward_sizes: tuple[int, ...] = ()
    """By layer, the width of the feed-forward that every token takes, where they differ."""
    num_predict_layers: int = 0
    """Blocks after the last layer that predict further tokens; layers do not count them."""
    next_block_centers: bool = False
    """Whether such a block's last norm takes the mean off first."""
    next_blocks_raw: bool = False
    """Whether such blocks take and hand on states before their norm; else those behind it."""
    own_next_blocks: tuple[NextBlockSpec, ...] = ()
    """What each of them is; none where all are routed layers that see all tokens."""
    recurrent: DeltaShape | ShortConvShape | MambaShape | SelectiveShape | None = None
    """What recurrent layers compute."""
    norms_center: bool = False
    """Whether norms of the residual stream take the mean off first."""
    norms_have_bias: bool = False
    """Whether such norms have biases, and maybe the head."""
    attention_clip: float = 0.0
    """What queries, keys and values are limited to in size; 0 where they are not."""
    logit_softcap: float = 0.0
    """Logits become softcap * tanh(logit / softcap); 0 leaves them."""
    output_norm: str = "output_norm.weight"
    """The tensor of the last norm's gains."""
    latent: LatentSpec | None = None
    """How layers attend where heads share one cached row, of head_dim numbers."""
    indexer: IndexerSpec | None = None
    """What chooses the positions that such layers read; None where they read all."""
    streams: StreamsSpec | None = None
    """How the residual stream is several; None where it is one."""
    ngrams: NGramSpec | None = None
    """Embeddings of n-grams; None without."""
    entries: EntriesSpec | None = None
    """How layers attend whose tokens read a window and entries; None where they read positions."""
    num_layers_by_token: int = 0
    """First layers whose experts are looked up by a token's id."""
    own_attention_scale: float | None = None
    """What attention scores are multiplied with; None is the usual 1 / sqrt(head_dim)."""
    temperature: Temperature | None = None
    """The factor on scores that grows with the position, in layers that have one."""
    embedding_scale: float = 1.0
    """The factor on embedded tokens."""
    attention_factor: float = 1.0
    """The factor on what attention adds to the residual stream, besides `residual_scale`."""
    residual_scale: float = 1.0
    """The factor on what attention and the feed-forward add to the residual stream."""
    logit_scale: float = 1.0
    """The factor on logits."""

    own_pooling: Pooling | None = None
    """How the file says that embeddings are made."""
    num_scores: int = 0
    """Outputs of a reranker's head; 0 for a model of text."""

    @property
    def pooling(self) -> Pooling:
        """How embeddings are made: by the last token's state unless the file names another way."""
        return self.own_pooling or Pooling.LAST

    @property
    def turns_far(self) -> bool:
        """Whether heads turn by the factors of long contexts, for short sequences too: keys stay as they were cached."""
        if not isinstance(self.rope_scaling, LongRope):
            return False
        return (self.served_tokens or self.context_length) > self.rope_scaling.original_context

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
    def expert_tables(self) -> tuple[str, ...]:
        """Names of the tensors by which tokens' experts are looked up, a layer each."""
        return tuple(f"blk.{n}.ffn_gate_tid2eid.weight" for n in range(self.num_layers_by_token))

    @property
    def main_states(self) -> dict[LayerIndex, StateShape]:
        """The `state` of each layer that keeps it."""
        state = self.state
        return {} if state is None else dict.fromkeys(self.recurrent_layers, state)

    @property
    def further_states(self) -> dict[LayerIndex, StateShape]:
        """What layers keep of a sequence besides keys, values and `state`, where they do."""
        ngrams, entries = self.ngrams, self.entries
        if entries is not None:
            return {LayerIndex(n): entries.state(n, self.head_dim) for n in range(self.num_layers)}
        return {} if ngrams is None else {ngrams.layer: ngrams.state(self.stream_size)}

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps more of a sequence than keys and values."""
        return bool(self.main_states or self.further_states)

    @property
    def layers_with_states(self) -> tuple[LayerIndex, ...]:
        """Those that do."""
        return tuple(LayerIndex(n) for n in range(self.num_layers) if self.state_bytes(n))

    @property
    def sequence_state_bytes(self) -> int:
        """Bytes of what all layers keep of a sequence besides keys and values."""
        return sum(self.state_bytes(layer) for layer in range(self.num_layers))

    def state_bytes(self, layer: int) -> int:
        """Return the bytes of what a layer keeps of a sequence besides keys and values."""
        found = (of.get(LayerIndex(layer)) for of in (self.main_states, self.further_states))
        return sum(shape.num_bytes for shape in found if shape is not None)

    @property
    def stream_size(self) -> int:
        """Width of the whole residual stream."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values by layer."""
        return (
            self.own_kv_shapes or (HeadShape(self.num_kv_heads, self.head_dim),) * self.num_layers
        )

    @property
    def next_block_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values of the blocks that predict further tokens: those of layers that keep all tokens.

        Such a block reads all positions, unless it has a window.
        """
        if self.own_next_blocks:
            return tuple(block.shape for block in self.own_next_blocks)
        return (self._next_block_shape,) * self.num_predict_layers

    @property
    def with_next_blocks(self) -> ModelSpec:
        """The dimensions with such blocks as further entries of what is listed by layer."""
        blocks = self.own_next_blocks
        if not blocks:
            return self
        heads = self.layer_heads or (self.num_heads,) * self.num_layers
        dense = [n for n, block in enumerate(blocks, self.num_layers) if block.dense_size]
        width = max(block.dense_size for block in blocks)
        return replace(
            self,
            layer_heads=(*heads, *(block.num_heads for block in blocks)),
            own_kv_shapes=(*self.kv_shapes, *(block.shape for block in blocks)),
            own_layer_kinds=(*self.layer_kinds, *(block.kind for block in blocks)),
            own_dense_layers=(*sorted(self.dense_layers), *dense),
            dense_intermediate_size=self.dense_intermediate_size or width,
        )

    @property
    def _next_block_shape(self) -> HeadShape:
        return next(
            (
                replace(shape, index=0)
                for kind, shape in zip(self.layer_kinds, self.kv_shapes, strict=True)
                if kind is LayerKind.ATTENTION
            ),
            HeadShape(self.num_kv_heads, self.head_dim),
        )

    def at(self, index: int) -> ModelSpec:
        """Return the dimensions with the heads, the feed-forward and the experts of one layer as everyone's."""
        heads, shape = self.layer_heads, self.kv_shapes[index]
        dense, shared = self.dense_intermediate_size, self.shared_intermediate_size
        if widths := self.own_feed_forward_sizes:
            dense, shared = (widths[index] if width else 0 for width in (dense, shared))
        experts = self.own_expert_sizes
        latent, scale = self.latent, self.own_attention_scale
        near = None if self.window is None else self.window.latent
        if near is not None and self.layer_kinds[index] is LayerKind.WINDOW:
            latent, scale = near, math.pow(near.key_dim, -0.5)
        return replace(
            self,
            latent=latent,
            own_attention_scale=scale,
            router=self.router.at(index),
            expert_intermediate_size=experts[index] if experts else self.expert_intermediate_size,
            dense_intermediate_size=dense,
            shared_intermediate_size=shared,
            num_heads=heads[index] if heads else self.num_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
        )

    @property
    def kv_sources(self) -> dict[LayerIndex, LayerIndex]:
        """The layers that attend to the keys and values of an earlier one, and that one of each."""
        pairs = enumerate(self.own_kv_sources)
        return {LayerIndex(n): LayerIndex(source) for n, source in pairs if source != n}

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
        """Layers that keep no keys and values: recurrent ones, those without a mixer, and readers of another's."""
        without = (*self.recurrent_layers, *self._layers_of(LayerKind.NONE), *self.kv_sources)
        return tuple(sorted(without))

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
        found = (
            (self.expert_hidden_size != self.hidden_size, "products around experts"),
            (self.layer_embedding_size > 0, "embeddings of each layer"),
            (bool(self.kv_sources), "attention to another layer's keys"),
            (self.indexer is not None, "attention to chosen positions"),
            (self.streams is not None, "several residual streams"),
        )
        return " and ".join(what for is_there, what in found if is_there)

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied with."""
        own = self.own_attention_scale
        return math.pow(self.head_dim, -0.5) if own is None else own

    def _layers_of(self, wanted: LayerKind) -> tuple[LayerIndex, ...]:
        kinds = enumerate(self.layer_kinds)
        return tuple(LayerIndex(index) for index, kind in kinds if kind is wanted)
