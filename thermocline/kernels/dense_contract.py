"""The contract of a layer's parts other than products with weights.

Norms, rotary embedding, the key-value cache, attention, routing, and the sum of expert outputs. All
arrays are C-contiguous and results are new arrays unless a method says otherwise. A token's numbers
depend on the implementation and on the token alone: never on which tokens are computed together, and
never on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import isqrt
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.kernels.cache_format import CacheShape
    from thermocline.kernels.delta_contract import DeltaInput, DeltaRule
    from thermocline.kernels.recurrent_contract import (
        MambaRule,
        RecurrentStates,
        SelectiveInput,
        SelectiveRule,
        ShortConvRule,
    )
    from thermocline.kernels.weight import ByteArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cached keys and values; see cache_format for where numbers lie.

    keys: uint8, of shape.array_shape; values: of shape.value_shape; index: of shape.index_shape, None without an indexer.
    Valid while the pool lives.
    """

    shape: CacheShape
    keys: ByteArray
    values: ByteArray
    index: ByteArray | None = None

    @property
    def arrays(self) -> tuple[ByteArray, ...]:
        """All of them: [blocks, ...] each."""
        both = self.keys, self.values
        return both if self.index is None else (*both, self.index)


class TokenRun(Protocol):
    """One sequence's tokens of a chunk: rows [start, start + length), and the blocks that hold it.

    Position p lies in slot block_table[p // block_tokens] * block_tokens + p % block_tokens. Blocks
    without a position that the run's tokens attend to may be arbitrary.
    """

    @property
    def start(self) -> int:
        """The first row."""
        ...

    @property
    def length(self) -> int:
        """Number of rows."""
        ...

    @property
    def block_table(self) -> IntArray:
        """The cache's blocks, int32."""
        ...

    @property
    def num_expanded(self) -> int:
        """How many of its first tokens take the expanded form, in layers with latent attention."""
        ...


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding of a chunk's tokens: cosines and sines, float32 [tokens, rotary_dims / 2].

    pairs: dimension 2i turns with 2i + 1; else dimension i with i + rotary_dims / 2.
    """

    cosines: FloatArray
    sines: FloatArray
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each head of queries, keys and values; gains are float32 [head_dim] or [value_dim], None is no norm.

    last: heads turn before it, not after it.
    """

    q_gain: FloatArray | None
    k_gain: FloatArray | None
    epsilon: float
    last: bool = False
    v_gain: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LatentNorm:
    """RMS norm of the latent numbers of a token; gain: float32 [latent]."""

    gain: FloatArray
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class Centering:
    """What a norm does besides, that takes the mean off first. bias: float32 [width], see `DenseKernels.layer_norm`."""

    bias: FloatArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PostNorm:
    """RMS norm of what a part of a layer gives, before it is added; see `DenseKernels.add_normed`.

    gain: float32 [width]. parts: the same of two inputs, each normed before the two are added; None where they are not, and
    for one input. scale: multiplies the sum.
    """

    gain: FloatArray
    epsilon: float
    scale: float = 1.0
    parts: tuple[FloatArray, FloatArray] | None = None


class Activation(IntEnum):
    """A gate's activation. The values are the compiled core's."""

    SIGMOID = 0
    SOFTPLUS = 1
    GELU = 2
    """Approximated with tanh."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """A factor on a token's scores that grows with its position: 1 + scale * ln(1 + (position + offset) // length)."""

    scale: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Attending:
    """How scores are transformed: scale, then softcap * tanh(score / softcap) unless softcap is 0.

    window: a token sees only that many last positions, its own included; 0 is all of them. chunked: the window does not
    slide: a token sees the positions from the last multiple of `window` on. temperature: multiplies scale. sinks: float32
    [heads], of each head a further score, which takes its share of the softmax as it is and adds no value. chosen: uint16
    [tokens, words], or [tokens, kv_heads, words] where key heads differ in it, of caches that are not latent: a token reads
    position 16 * w + b only where bit b of word w of its row is set, one at least; None reads all. A row has words for
    all positions of q. Positions that a token does not read must have been written all the same, up to its own.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: FloatArray | None = None
    chunked: bool = False
    temperature: Temperature | None = None
    chosen: NDArray[np.uint16] | None = None


class Gating(IntEnum):
    """How router logits become scores. The values are the compiled core's, and GGUF's but for the last."""

    SOFTMAX = 1
    """Over all experts together."""
    SIGMOID = 2
    """Each by itself."""
    SOFTMAX_CHOSEN = 3
    """The logits decide, and the weights are a softmax over the chosen ones alone."""
    SQRT_SOFTPLUS = 4
    """Each by itself: the square root of ln(1 + e^logit)."""
    NEAR_BEST = 64
    """The logits decide; a chosen one's weight is its share in a softmax of those near it that were not chosen before.

    Others are near it unless it - other is above `NEAR_BEST_RANGE` * max(|other|, it). No file names this.
    """


NEAR_BEST_RANGE: Final = 0.02
"""Of `Gating.NEAR_BEST`."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRule:
    """Scores of all experts, then the best `chosen`; see `DenseKernels.route`.

    bias: float32 [experts], added to the scores for the choice alone. logit_bias: float32 [experts], added to the
    logits. groups: experts lie in so many groups of equal size, and only those of the best groups_used can be
    chosen. A group is as good as the sum of its best group_best experts, one or two; it has at least so many.
    """

    chosen: int
    normalize: bool
    min_sum: float
    scale: float
    gating: Gating = Gating.SOFTMAX
    bias: FloatArray | None = None
    logit_bias: FloatArray | None = None
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2


MAX_STREAMS: Final = 16
"""The most that `BalanceRule` takes."""


@dataclass(frozen=True, slots=True, eq=False)
class BalanceRule:
    """How logits become what weighs and mixes several streams, two or more; see `DenseKernels.take_streams`.

    base: float32 [(2 + streams) * streams], added to logits times scales: float32 [3], one each of weights, shares and the
    matrix. floor: added to weights, to the matrix and to what it is divided by. rounds: how often the sums of columns divide
    the matrix, at least once.
    """

    base: FloatArray
    scales: FloatArray
    floor: float
    rounds: int

    @property
    def streams(self) -> int:
        """How many streams there are."""
        return isqrt(len(self.base) + 1) - 1


@dataclass(frozen=True, slots=True)
class Contributions:
    """One tier's expert outputs: values[i] belongs to token rows[i] and its slot slots[i]."""

    rows: IntArray
    slots: IntArray
    values: FloatArray


class DenseKernels(Protocol):
    """One implementation. Every method blocks until done and may be called from several threads."""

    def rms_norm(self, x: FloatArray, gain: FloatArray, epsilon: float) -> FloatArray:
        """Return x / sqrt(mean(x^2) + epsilon) * gain over the last axis of x [rows, width]."""
        ...

    def layer_norm(
        self, x: FloatArray, gain: FloatArray, epsilon: float, bias: FloatArray | None = None
    ) -> FloatArray:
        """Return the same of x - mean(x), plus the bias, float32 [width], where there is one."""
        ...

    def rope_table(
        self,
        positions: IntArray,
        frequencies: NDArray[np.float64],
        *,
        magnitude: float = 1.0,
        pairs: bool = False,
    ) -> RopeTable:
        """Return cosines and sines of position * frequency, taken in double, times `magnitude`."""
        ...

    def prepare_heads(
        self,
        q: FloatArray,
        k: FloatArray | None,
        v: FloatArray | None,
        norm: HeadNorm,
        rope: RopeTable,
        cache: LayerCache,
        slots: IntArray,
    ) -> None:
        """Norm and turn q [tokens, heads, head_dim] in place; norm, turn and store k; norm and store v. See `HeadNorm`.

        k: [tokens, kv_heads, head_dim] and v: [tokens, kv_heads, value_dim], unchanged, and maybe the same; both None where
        the cache has them already.
        slots: [tokens], each at most once.
        """
        ...

    def prepare_latent(
        self,
        q: FloatArray,
        kv: FloatArray,
        norm: LatentNorm,
        rope: RopeTable,
        cache: LayerCache,
        slots: IntArray,
    ) -> None:
        """Turn the last numbers of q's heads in place; store kv, its first numbers normed and the others turned.

        q: [tokens, heads, width]; kv: [tokens, latent + rotary_dims]; slots: [tokens], each at most once. Pairs turn,
        whatever `rope` says.
        """
        ...

    def index_scores(
        self,
        q: FloatArray,
        weights: FloatArray,
        block_table: IntArray,
        num_positions: int,
        cache: LayerCache,
        *,
        step: int = 1,
        clips: bool = True,
    ) -> FloatArray:
        """Return float32 [tokens, num_positions // step]: what an indexer says of a sequence's positions, seen or not.

        q: [tokens, heads, index]; weights: [tokens, heads]. It is the sum over heads of weight * max(0, q . row), of the
        rows that `cache_format.write_index` stored in the blocks of block_table, as for a `TokenRun`. step: the last position
        of each run of so many has a score, entry n is position n * step + step - 1. clips: as said; else products count as they
        are.
        """
        ...

    def attention(
        self,
        q: FloatArray,
        positions: IntArray,
        runs: Sequence[TokenRun],
        cache: LayerCache,
        rule: Attending,
        *,
        prompt: bool = False,
    ) -> FloatArray:
        """Return float32 [tokens, heads, value_dim]: causal attention of each sequence's tokens.

        q: [tokens, heads, head_dim]; heads is a multiple of kv_heads, and query head h reads key head
        h // (heads // kv_heads). The runs follow each other and cover q;
        a sequence that was given once must not change. prompt: as for `Kernels.matmul`; a cache of float32 has one arithmetic.
        """
        ...

    def gate(self, x: FloatArray, gate: FloatArray, activation: Activation) -> FloatArray:
        """Return x [rows, width] times the activation of gate, which is [rows, width] or [rows, 1]."""
        ...

    def route(
        self, logits: FloatArray, rule: RoutingRule, given: IntArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        """Return (ids int32, weights float32), each [tokens, chosen]: best first, ties by lower id, also of groups.

        normalize: weights are divided by their sum, taken as at least min_sum. Then they are multiplied by scale. given: int32
        [tokens, chosen], each below the number of experts: the ids, in this order, whatever bias and groups say.
        """
        ...

    def delta_rule(
        self,
        given: DeltaInput,
        rule: DeltaRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        """Write to out [tokens, value_width] the gated delta rule over some sequences' tokens.

        runs: int32 [n, 3], rows that follow each other: first row, tokens, and the slot of the sequence's
        state, which moves on; a slot at most once. Rows in no run are left alone.
        """
        ...

    def recur(
        self,
        rows: FloatArray,
        rule: ShortConvRule | MambaRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        """Write to out [tokens, shape.width] a short convolution or Mamba2 over some sequences' tokens.

        rows: float32 [tokens, shape.row]; runs: as for `delta_rule`.
        """
        ...

    def selective_convolution(
        self,
        rows: FloatArray,
        rule: SelectiveRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        """Write to out [tokens, width] the first Mamba's silu(convolution(x) + bias); moves states.conv on.

        rows: float32 [tokens, shape.row]; runs: as for `delta_rule`.
        """
        ...

    def selective_scan(
        self,
        given: SelectiveInput,
        rule: SelectiveRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        """Write to out [tokens, width] what the first Mamba's last product takes; moves states.recurrent on.

        step = softplus(steps + step_bias) and x = convolved, by column. A token changes the state to state * exp(step *
        decay) + key * step * x, and gives (query . state + skip * x) * silu(z). runs: as for `delta_rule`.
        """
        ...

    def add_normed(
        self, x: FloatArray, first: FloatArray, second: FloatArray | None, norm: PostNorm
    ) -> FloatArray:
        """Return (x + norm(y)) * scale of x [rows, width], where y is the sum of one input or two.

        Where the norm has parts there are two, and each is normed first.
        """
        ...

    def softcap(self, x: FloatArray, cap: float) -> FloatArray:
        """Return cap * tanh(x / cap) of x [rows, width]."""
        ...

    def take_streams(
        self, x: FloatArray, logits: FloatArray, rule: BalanceRule
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return what a part of a layer takes of streams, the mixture that is left, and each stream's share of what it gives.

        x: [tokens, streams * width]; logits: [tokens, (2 + streams) * streams]. They are [tokens, width], [tokens, streams *
        width] and [tokens, streams]. Logits are of weights, shares and a matrix [streams, streams], in this order. weights:
        sigmoid + floor; shares: 2 * sigmoid. The matrix: the softmax of each row + floor, divided by its columns' sums +
        floor, and then by turns by those of rows and of columns. taken: the sum of weights[i] * x[i]; left of stream j: the
        sum of matrix[i, j] * x[i].
        """
        ...

    def pool_rows(self, rows: FloatArray, gates: FloatArray, places: FloatArray) -> FloatArray:
        """Return float32 [n, width]: of each number the mean over an entry's rows, weighed by a softmax of gates + places.

        rows, gates: [n, count, width]; places: [count, width]. Rows are added in their order. A gate of minus infinity weighs
        zero; of each number, one gate is another.
        """
        ...

    def combine(
        self, residual: FloatArray, parts: Sequence[Contributions], num_slots: int
    ) -> FloatArray:
        """Return residual + ((slot 0 + slot 1) + ...); every (token, slot) is in the parts once."""
        ...
