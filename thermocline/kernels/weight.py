"""A layer's weight matrices as they lie in the file, and the kinds of arrays that kernels take. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    scale: the factor on every product with it and on every decoded row.
    """

    name: str
    format: BlockFormat
    raw: ByteArray
    cols: int
    scale: float = 1.0

    @property
    def rows(self) -> int:
        """Number of output features."""
        return int(self.raw.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes that one full read of the matrix touches."""
        return self.raw.nbytes


class ExpertActivation(IntEnum):
    """What an expert computes of its gate's values g and its up values u. The values are the compiled core's.

    CLAMPED_SILU is gpt-oss' with c = min(g, 7) and d = u within -7 and 7. GELU is approximated with tanh.
    SQUARED_RELU takes u alone: an expert with it has no gate. LIMITED_SILU has `SiluLimits`.
    """

    SILU = 0
    """silu(g) * u."""
    CLAMPED_SILU = 1
    """c * sigmoid(1.702 * c) * (d + 1)."""
    GELU = 2
    """gelu(g) * u."""
    SQUARED_RELU = 3
    """max(u, 0)^2."""
    LIMITED_SILU = 4
    """min(silu(g), a) * d, where d = u within -b and b."""
    RELU = 5
    """max(g, 0) * u."""

    @property
    def has_gate(self) -> bool:
        """Whether an expert has a gate matrix."""
        return self is not ExpertActivation.SQUARED_RELU

    @property
    def is_linear_in_up(self) -> bool:
        """Whether a factor on u is a factor on the result."""
        return self in {ExpertActivation.SILU, ExpertActivation.GELU, ExpertActivation.RELU}


class SiluLimits(NamedTuple):
    """The limits of LIMITED_SILU, positive: the most that silu(g) is, and how far from zero u is at most."""

    gate: float
    up: float


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's matrices: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: Weight | None
    up: Weight
    down: Weight

    @property
    def nbytes(self) -> int:
        """Bytes that computing this expert once reads, without biases."""
        gate_bytes = 0 if self.gate is None else self.gate.nbytes
        return gate_bytes + self.up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class WeightStack:
    """One matrix per expert, as they lie in the file.

    raw: uint8 [experts, rows, bytes of a row], a view of the mapped file. scales: float32 [experts], each
    matrix's own; None where all are 1.
    """

    name: str
    format: BlockFormat
    raw: ByteArray
    cols: int
    scales: FloatArray | None = None

    def __len__(self) -> int:
        return int(self.raw.shape[0])

    def __getitem__(self, expert: int) -> Weight:
        scale = 1.0 if self.scales is None else float(self.scales[expert])
        return Weight(f"{self.name}[{expert}]", self.format, self.raw[expert], self.cols, scale)


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """What makes keys and values of heads out of latent numbers.

    Of each head, keys: [latent, numbers of a key that are not turned], transposed; values: [value_dim, latent].
    """

    keys: WeightStack
    values: WeightStack


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Numbers that are added to products of experts: F32 stacks of one row, a number per row of the matrix.

    gate: None where there is no gate. down's is added before the routing weight multiplies.
    """

    gate: WeightStack | None
    up: WeightStack
    down: WeightStack


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The experts of one layer: gate and up [E, intermediate, hidden], down [E, hidden, intermediate].

    gate: None where the activation has no gate. limits: of LIMITED_SILU. Experts with biases have no scales.
    """

    gate: WeightStack | None
    up: WeightStack
    down: WeightStack
    activation: ExpertActivation = ExpertActivation.SILU
    biases: ExpertBiases | None = None
    limits: SiluLimits | None = None

    def __post_init__(self) -> None:
        is_limited = self.activation is ExpertActivation.LIMITED_SILU
        assert (self.gate is not None) == self.activation.has_gate, "a gate too many or too few"
        assert (self.limits is not None) == is_limited, "limits too many or too few"

    @property
    def hidden_size(self) -> int:
        """Width of what goes in and comes out."""
        return self.up.cols

    @property
    def intermediate_size(self) -> int:
        """Width between the products."""
        return self.down.cols

    @property
    def matrices(self) -> tuple[WeightStack, ...]:
        """Gate, up and down, as far as there are."""
        return tuple(part for part in (self.gate, self.up, self.down) if part is not None)

    @property
    def bias_parts(self) -> tuple[WeightStack, ...]:
        """The biases of `matrices`, or none."""
        found = self.biases
        if found is None:
            return ()
        return tuple(part for part in (found.gate, found.up, found.down) if part is not None)

    @property
    def parts(self) -> tuple[WeightStack, ...]:
        """All that an expert is made of, in the order of its slot: the matrices, then the biases."""
        return (*self.matrices, *self.bias_parts)

    def made_of(self, parts: Sequence[WeightStack]) -> Self:
        """Return experts of the same formula from other `parts`."""
        *gate, up, down = parts[: len(self.matrices)]
        biases = None
        if self.biases is not None:
            *gate_bias, up_bias, down_bias = parts[len(self.matrices) :]
            biases = ExpertBiases(gate_bias[0] if gate_bias else None, up_bias, down_bias)
        return replace(self, gate=gate[0] if gate else None, up=up, down=down, biases=biases)

    def pair_factors(self) -> tuple[FloatArray, FloatArray] | None:
        """Return float32 [experts] twice: the scales of gate, and what the scales of up and down multiply an output by.

        Where an output is linear in what up gives, that is their product. A squared ReLU takes the square of up's,
        which is positive. None where no matrix has a scale.
        """
        gate = None if self.gate is None else self.gate.scales
        up, down = self.up.scales, self.down.scales
        if gate is None and up is None and down is None:
            return None
        ones = np.ones(len(self), np.float32)
        gates, ups, downs = (ones if part is None else part for part in (gate, up, down))
        if self.activation is ExpertActivation.SQUARED_RELU:
            ups = ups * ups
        return gates, downs * ups

    def __len__(self) -> int:
        return len(self.up)

    def __getitem__(self, expert: int) -> ExpertWeights:
        gate = None if self.gate is None else self.gate[expert]
        return ExpertWeights(gate, self.up[expert], self.down[expert])
