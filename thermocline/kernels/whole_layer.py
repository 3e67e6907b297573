"""Inputs of a whole layer as one native job, for few tokens; its parts one after another are the reference.

Knows no model: a layer is its weights and its rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.compressed_weights import CompressedWeights
    from thermocline.kernels.delta_contract import DeltaRule
    from thermocline.kernels.dense_contract import (
        Activation,
        Centering,
        HeadNorm,
        LatentNorm,
        LayerCache,
        PostNorm,
        RopeTable,
        RoutingRule,
        Temperature,
        TokenRun,
    )
    from thermocline.kernels.recurrent_contract import (
        MambaRule,
        RecurrentStates,
        SelectiveRule,
        ShortConvRule,
    )
    from thermocline.kernels.stream_weights import LayerStreams
    from thermocline.kernels.weight import (
        ExpertStack,
        FloatArray,
        HeadMatrices,
        IntArray,
        Weight,
    )


@dataclass(frozen=True, slots=True, eq=False)
class OutputGate:
    """The gate on attention's output, after its activation: one number per head, or one per output.

    weight: float32 numbers from the layer's normed input [heads, or heads * value_dim, hidden]; None where
    each head's rows of q are followed by as many rows of its gate.
    """

    activation: Activation
    weight: Weight | None


NO_NORM: Final = np.empty(0, np.float32)
"""In place of gains: what a mixer takes is normed already, and it returns what is added to the residual stream alone."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockIndexer:
    """What chooses the blocks of `block` positions that a token of grouped-query attention reads.

    q: [heads * index, hidden]; k: [index, hidden]. gains: float32 [index], of RMS norms with `epsilon` of each head of q, and
    of the mean of a block's k; behind them first numbers turn, the mean's as at the block's first position. A block's score
    is the sum over heads of what of q . k is above zero. A token reads the whole blocks with the highest, of most_read positions
    together, and what it sees behind the last whole one.
    """

    q: Weight
    k: Weight
    gains: tuple[FloatArray, FloatArray]
    epsilon: float
    block: int
    most_read: int


@dataclass(frozen=True, slots=True, eq=False)
class HeadIndexer:
    """What chooses, for each key head of grouped-query attention, the blocks of `block` positions that a token reads of it.

    q: [kv_heads * index, hidden]; k: [index, hidden]. gains: float32 [index], of RMS norms with `epsilon` of each head of q, and
    of k, which turn then. The best `most_blocks` are read, the last `local` ones among them.
    """

    q: Weight
    k: Weight
    gains: tuple[FloatArray, FloatArray]
    epsilon: float
    block: int
    most_blocks: int
    local: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """One layer's grouped-query attention. norm: float32 [hidden], with head_norm's epsilon; or `NO_NORM`.

    wide_norm: gains of queries and keys over all heads together, float32 [heads * head_dim] and [kv_heads *
    head_dim]; head_norm then has no gains. scale, window, chunked, temperature, sinks: see `Attending`. biases: added to
    q, k and v, float32. output_bias: float32 [hidden], added to what attention gives. v: k itself where values are the
    keys before their norm; then there are neither biases nor a wide norm. k, v: None where the cache is another layer's,
    which has stored both; then there are no gains and biases of them either. post_norm: of the output, before it is
    added; of one part. centering: of the norm, where it takes the mean off first. indexer: what chooses the positions that a
    token reads; None where it reads all. clip: what q, k and v are limited to in size, behind their biases; 0 where they are
    not. Then v is not k, and no gate lies in q.
    """

    norm: FloatArray
    q: Weight
    k: Weight | None
    v: Weight | None
    output: Weight
    head_norm: HeadNorm
    scale: float
    biases: tuple[FloatArray, FloatArray, FloatArray] | None = None
    wide_norm: tuple[FloatArray, FloatArray] | None = None
    window: int = 0
    gate: OutputGate | None = None
    sinks: FloatArray | None = None
    output_bias: FloatArray | None = None
    post_norm: PostNorm | None = None
    chunked: bool = False
    temperature: Temperature | None = None
    centering: Centering | None = None
    indexer: BlockIndexer | HeadIndexer | None = None
    clip: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """One layer's gated delta rule. norm: float32 [hidden], with the rule's epsilon; or `NO_NORM`.

    mixed: one to three matrices whose rows follow each other, together [channels, hidden]; z: [value_width, hidden];
    alpha: [steps, hidden]; beta: [value_heads, hidden]; output: [hidden, value_width]. z_low, alpha_low: [rank, hidden],
    products before those of z and alpha, which then take its rank of numbers.
    """

    norm: FloatArray
    mixed: tuple[Weight, ...]
    z: Weight
    alpha: Weight
    beta: Weight
    output: Weight
    rule: DeltaRule
    z_low: Weight | None = None
    alpha_low: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveProducts:
    """The first Mamba's products of what its convolution gives, with norms behind them of its layer's epsilon.

    firsts: [rank, width] of steps, [state_dim, width] of keys and of queries; gains: float32, a number per row of each.
    steps: [width, rank], of the first one's normed rows.
    """

    firsts: tuple[Weight, Weight, Weight]
    gains: tuple[FloatArray, FloatArray, FloatArray]
    steps: Weight


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """One layer's short convolution, Mamba2 or first Mamba. norm: float32 [hidden], with `epsilon`.

    input: [shape.row, hidden]; output: [hidden, shape.width]; products: of the first Mamba, and of no other.
    """

    norm: FloatArray
    epsilon: float
    input: Weight
    output: Weight
    rule: ShortConvRule | MambaRule | SelectiveRule
    products: SelectiveProducts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A product before another, with a norm between them. weight: [rank, hidden]; gain: float32 [rank]."""

    weight: Weight
    gain: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Indexer:
    """What chooses the positions that a token of sparse attention reads; its row of each token is cached.

    q: [heads * index, rank of `LatentWeights.low`], whose heads' first numbers are turned, or their last ones (`turns_last`), and
    those of rows: by halves, or in `pairs`; k: [index, hidden], a row before its norm; gain, bias: float32 [index], of that norm,
    which takes the mean off first, with `epsilon`. weights: [heads, hidden], how much a head says, times `scale`. pool: where positions are chosen in
    blocks; None where one by one.
    """

    q: Weight
    k: Weight
    gain: FloatArray
    bias: FloatArray
    epsilon: float
    weights: Weight
    scale: float
    pairs: bool
    pool: KeyPool | None = None
    turns_last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KeyPool:
    """How an indexer's rows become one for `block` positions, which are chosen together: a mean, weighted by number.

    gate: [index, hidden], a token's weights before their softmax over the block; places: float32 [block, index], added to them.
    """

    gate: Weight
    places: FloatArray

    @property
    def block(self) -> int:
        """How many positions."""
        return len(self.places)


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """One layer's multi-head latent attention. norm: float32 [hidden], with the epsilon of kv_norm; or `NO_NORM`.

    q: [heads * width, hidden, or the rank of `low`], whose heads' last numbers are turned; kv: [latent + turned
    numbers, hidden], the row that is cached; output: [hidden, heads * value_dim]. scale, temperature, sinks, window: see `Attending`;
    with sinks or a window nothing takes the expanded form. turned_gain: float32 [turned numbers], of an RMS norm of what turns of
    a row, before it does; with the epsilon of kv_norm. Of these three the core's whole layers and devices know nothing. gate: [heads, hidden], or [heads * value_dim, hidden],
    whose sigmoids multiply what heads give; None without. The core's whole layers and devices have a number for each head. most_read: how many positions a token
    reads, which the indexer chooses, or chose in the last layer that has one; 0 where it reads all. block: how many positions
    are chosen together.
    """

    norm: FloatArray
    low: LowRank | None
    q: Weight
    kv: Weight
    kv_norm: LatentNorm
    up: HeadMatrices
    output: Weight
    scale: float
    temperature: Temperature | None = None
    gate: Weight | None = None
    most_read: int = 0
    indexer: Indexer | None = None
    block: int = 1
    sinks: FloatArray | None = None
    window: int = 0
    turned_gain: FloatArray | None = None

    @property
    def is_by_parts(self) -> bool:
        """Whether neither the core's whole layers nor devices know of all that it has."""
        has_more = self.sinks is not None or self.window > 0 or self.turned_gain is not None
        return has_more or (self.gate is not None and self.gate.rows != len(self.up.keys))


@dataclass(frozen=True, slots=True, eq=False)
class BranchNorms:
    """Norms of the residual stream for a router and its experts, which then do not take the layer's normed input.

    router, experts: float32 [hidden], with the layer's epsilon.
    """

    router: FloatArray
    experts: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class AroundExperts:
    """Products around experts of another width than the layer's. down: [width, hidden]; up: [hidden, width].

    down gives what the experts take; up takes their weighted sum.
    """

    down: Weight
    up: Weight


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """A layer's router and routed experts. router: [experts, hidden]. own: where their inputs are theirs alone.

    around: where the experts have another width than the layer; such a layer does not end with a norm. weighs_input: a
    token's weight multiplies what its expert takes, and what it gives has weight 1; for one expert of each token,
    and not with `around`. by_token: int32 [vocabulary, chosen], where each token's experts are known by its id, and the router
    only weighs them.
    """

    router: Weight
    rule: RoutingRule
    stack: ExpertStack
    own: BranchNorms | None = None
    around: AroundExperts | None = None
    weighs_input: bool = False
    by_token: IntArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An expert for every token: a stack of one. gate: [1, hidden], whose sigmoid weighs it; None is 1."""

    stack: ExpertStack
    gate: Weight | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerEmbedding:
    """What a layer adds, at its end, of each token's embedding e of its own: x + norm(up @ (gelu(gate @ x) * e)).

    gate: [width, hidden]; up: [hidden, width]; norm: of one part.
    """

    gate: Weight
    up: Weight
    norm: PostNorm


class HandedOn(IntEnum):
    """What attention hands on beside the residual stream. The values are the compiled core's."""

    NOTHING = 0
    NORMED = 1
    """What attention took, for a feed-forward that takes the same."""
    INPUT = 2
    """The layer's input, for a router that takes it as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The weights and rules of one layer.

    mixer: None in a layer that is a feed-forward alone. norm: float32 [hidden], before the experts, with `epsilon`, and
    `centering` where it takes the mean off first. A feed-forward has routed experts, a shared one (in a dense layer that is all of it), or both; a layer that is a mixer
    alone has neither, and no norm. end: where what they give is normed before it is added; its parts, where it has some,
    are the shared expert's output and the routed ones'.
    embedding: just in a layer that attends and has an end. handed_on: `NORMED` where the feed-forward takes what attention
    takes, the layer's normed input, of which `norm` has the gains; `INPUT` where its router alone takes the layer's
    input. Either for grouped-query attention without a post_norm, and without an end, own norms of the router, and
    products around experts. streams: where the residual stream is several; then the mixer has `NO_NORM`, and so has the
    layer, and nothing of the above but the mixer, routed experts and a shared one.
    """

    mixer: (
        AttentionWeights
        | LatentWeights
        | CompressedWeights
        | DeltaWeights
        | RecurrentWeights
        | None
    )
    norm: FloatArray | None
    epsilon: float
    routed: MoeWeights | None
    shared: SharedExpert | None = None
    end: PostNorm | None = None
    embedding: LayerEmbedding | None = None
    handed_on: HandedOn = HandedOn.NOTHING
    streams: LayerStreams | None = None
    centering: Centering | None = None


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A chunk as a layer's input. x: float32 [T, hidden]; positions, slots: int32 [T].

    embedded: float32 [T, width] of a layer with embeddings of tokens.
    """

    x: FloatArray
    positions: IntArray
    slots: IntArray
    rope: RopeTable
    runs: Sequence[TokenRun]
    cache: LayerCache
    is_prompt: bool
    embedded: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class RecurrentLayerInput:
    """The same for a recurrent layer.

    runs: int32 [n, 4], of all tokens: as for `DenseKernels.delta_rule`, and the slot that gets a copy of the
    state after the run, or -1. Runs of one slot follow each other.
    """

    x: FloatArray
    runs: IntArray
    states: RecurrentStates
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class PlainLayerInput:
    """The same for a layer without a mixer."""

    x: FloatArray
    is_prompt: bool


AnyLayerInput: TypeAlias = LayerInput | RecurrentLayerInput | PlainLayerInput


class OnRouted(Protocol):
    """What is told a layer's choice of experts before they are computed, on the thread that computes."""

    def __call__(self, expert_ids: IntArray, stream: FloatArray) -> None:
        """expert_ids: int32 [T, chosen], best first; stream: float32 [T, hidden], what the experts are added to."""
        ...


class WholeLayer(Protocol):
    """The mixer, routing and all chosen experts, with the same bits as the parts."""

    def __call__(
        self, parts: LayerParts, given: AnyLayerInput, on_routed: OnRouted | None = None
    ) -> tuple[FloatArray, IntArray, FloatArray]:
        """Return x float32 [T, hidden] after the layer, and the chosen experts, best first.

        Their ids are int32 and their weights float32 [T, chosen]. Appends to the cache, or updates the states. With
        on_routed, experts that are not in memory are computed last. Raises what on_routed raises; the cache is then
        written, and no expert computed.
        """
        ...
