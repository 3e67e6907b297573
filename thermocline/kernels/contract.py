"""What a kernel implementation must do, and the shapes it is given. Knows no implementation.

Numeric contract (docs/numerics.md): a token's result depends on the implementation, the weight's type
and the token alone, never on how many rows are computed together, in which order, or by how many threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.timeline import PoolTimeline
    from thermocline.kernels.whole_layer import WholeLayer
    from thermocline.modelfile.formats import BlockFormat

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
ByteArray = NDArray[np.uint8]

SUPPORTED_FORMATS = frozenset(
    [
        *["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"],
        *["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"],
        *["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"],
    ]
)
"""Block formats that every implementation computes from."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight matrix as it lies in the file.

    raw: uint8 [rows, bytes of a row], a view of the mapped file; it stays valid while the file is open.
    """

    name: str
    format: BlockFormat
    raw: ByteArray
    cols: int

    @property
    def rows(self) -> int:
        """Number of output features."""
        return int(self.raw.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes that one full read of the matrix touches."""
        return self.raw.nbytes


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: Weight
    up: Weight
    down: Weight

    @property
    def nbytes(self) -> int:
        """Bytes that computing this expert once reads."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class WeightStack:
    """One matrix per expert, as they lie in the file.

    raw: uint8 [experts, rows, bytes of a row], a view of the mapped file.
    """

    name: str
    format: BlockFormat
    raw: ByteArray
    cols: int

    def __len__(self) -> int:
        return int(self.raw.shape[0])

    def __getitem__(self, expert: int) -> Weight:
        return Weight(f"{self.name}[{expert}]", self.format, self.raw[expert], self.cols)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The experts of one layer: gate and up [E, intermediate, hidden], down [E, hidden, intermediate]."""

    gate: WeightStack
    up: WeightStack
    down: WeightStack

    def __len__(self) -> int:
        return len(self.gate)

    def __getitem__(self, expert: int) -> ExpertWeights:
        return ExpertWeights(self.gate[expert], self.up[expert], self.down[expert])


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """What some experts of one layer compute: pairs (token, slot), sorted by expert.

    experts, counts: int32 [n], each expert and how many pairs chose it; x: float32 [tokens, hidden]; rows:
    int32 [pairs], the token of each pair; scale: float32 [pairs], its routing weight. The first counts[0]
    pairs chose experts[0], and so on.
    """

    stack: ExpertStack
    experts: IntArray
    counts: IntArray
    x: FloatArray
    rows: IntArray
    scale: FloatArray


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

    @property
    def whole_layer(self) -> WholeLayer | None:
        """A layer as one job; None where there is no such thing."""
        ...

    def decode_rows(self, weight: Weight, rows: IntArray) -> FloatArray:
        """Return float32 [len(rows), cols]: the rows of `weight`, decoded. rows < weight.rows."""
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

    def expert_outputs(self, work: ExpertWork, *, prompt: bool = False) -> FloatArray:
        """Return float32 [pairs, hidden]: scale * down(silu(gate(x[row])) * up(x[row])) of each pair."""
        ...

    def expert_sum(
        self, work: ExpertWork, pair_of: IntArray, residual: FloatArray, *, prompt: bool = False
    ) -> FloatArray:
        """Return float32 [tokens, hidden]: residual + ((slot 0 + slot 1) + ...) of expert_outputs.

        pair_of: int32 [tokens, slots], which pair each slot is; residual: [tokens, hidden].
        """
        ...
