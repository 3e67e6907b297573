"""What a kernel implementation must do, and the shapes it is given. Knows no implementation.

Numeric contract (docs/numerics.md): a token's result depends on the implementation, the weight's type
and the token alone, never on how many rows are computed together, in which order, or by how many threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.dense_contract import (
        Attending,
        DenseKernels,
        LayerCache,
        TokenRun,
    )
    from thermocline.kernels.timeline import PoolTimeline
    from thermocline.kernels.weight import (
        ExpertStack,
        FloatArray,
        HeadMatrices,
        IntArray,
        Weight,
        WeightStack,
    )
    from thermocline.kernels.whole_layer import WholeLayer
    from thermocline.kernels.whole_step import PlacedParts, WholeStep


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """What some experts of one layer compute: pairs (token, slot), sorted by expert.

    experts, counts: int32 [n], each expert and how many pairs chose it; x: float32 [tokens, hidden]; rows:
    int32 [pairs], the token of each pair; scale: float32 [pairs], its routing weight. The first counts[0]
    pairs chose experts[0], and so on. may_be_missing: some weights may not be in memory yet; those that are may be
    computed first.
    """

    stack: ExpertStack
    experts: IntArray
    counts: IntArray
    x: FloatArray
    rows: IntArray
    scale: FloatArray
    may_be_missing: bool = False


class Kernels(Protocol):
    """One implementation of a layer's work: products here, the rest in `dense`.

    All arrays are C-contiguous; outputs are new.

    Every method blocks until done and may be called from several threads at once.

    prompt: all of x's tokens belong to prompts. An implementation may have another arithmetic for them;
    within each of the two a token's result depends on nothing else.
    """

    @property
    def name(self) -> str:
        """Short name for reports, for example "avx512 x 2" or "reference"."""
        ...

    @property
    def prompts_differ(self) -> bool:
        """Whether prompts have an arithmetic of their own."""
        ...

    @property
    def dense(self) -> DenseKernels:
        """The layer's parts that are not products with weights."""
        ...

    def timeline(self) -> PoolTimeline | None:
        """Return what the compute threads do and did, for one lane; None where there are none."""
        ...

    def give_back_memory(self) -> None:
        """Give back what the calling thread's jobs needed on the way and keep; later ones take what they need."""
        ...

    @property
    def whole_layer(self) -> WholeLayer | None:
        """A layer as one job; None where there is no such thing."""
        ...

    def whole_step(self, layers: Sequence[PlacedParts]) -> WholeStep | None:
        """Return what computes all of these layers as one job; None where `whole_layer` is.

        It keeps the arrays that they lie in. All routed layers choose as many experts.
        """
        ...

    def decode_rows(
        self, weight: Weight, rows: IntArray, *, may_be_missing: bool = False
    ) -> FloatArray:
        """Return float32 [len(rows), cols]: the rows of `weight`, decoded. rows < weight.rows.

        may_be_missing: some rows may not be in memory yet; all of these are asked for before one is waited for.
        """
        ...

    def multiply_all(
        self, weights: Sequence[Weight], x: FloatArray, *, prompt: bool = False
    ) -> tuple[FloatArray, ...]:
        """Return x [tokens, cols] times each transposed weight: float32 [tokens, weight.rows] each."""
        ...

    def matmul(
        self, weight: Weight, x: FloatArray, add: FloatArray | None = None, *, prompt: bool = False
    ) -> FloatArray:
        """Return float32 [tokens, weight.rows] = x times the transposed weight, plus `add` if given."""
        ...

    def multiply_heads(self, weights: WeightStack, x: FloatArray) -> FloatArray:
        """Return float32 [tokens, heads, rows]: x [tokens, heads, cols] times each head's transposed matrix."""
        ...

    def expanded_attention(
        self,
        up: HeadMatrices,
        q: FloatArray,
        positions: IntArray,
        runs: Sequence[TokenRun],
        cache: LayerCache,
        rule: Attending,
        *,
        prompt: bool = False,
    ) -> FloatArray:
        """Return float32 [tokens, heads, value_dim]: causal attention over keys and values made of a latent cache's rows.

        q: [tokens, heads, width], turned. A head's key is up.keys times a row's first numbers, then the others; its value
        is up.values times the first ones. positions, runs: as for `DenseKernels.attention`, of some tokens. rule: just its
        scale and temperature.
        """
        ...

    def expert_outputs(self, work: ExpertWork, *, prompt: bool = False) -> FloatArray:
        """Return float32 [pairs, hidden]: scale * down(inner) of each pair.

        inner is the stack's activation of gate(x[row]) and up(x[row]). Biases are parts of gate, up and down.
        """
        ...

    def expert_sum(
        self, work: ExpertWork, pair_of: IntArray, residual: FloatArray, *, prompt: bool = False
    ) -> FloatArray:
        """Return float32 [tokens, hidden]: residual + ((slot 0 + slot 1) + ...) of expert_outputs.

        pair_of: int32 [tokens, slots], which pair each slot is; residual: [tokens, hidden].
        """
        ...
