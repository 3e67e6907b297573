"""Inputs of a gated delta rule: sizes and parameters. Knows no implementation.

Each sequence has a state matrix [key_dim, value_dim] per value head. Every token decays it, corrects what it holds
under the token's key, and reads it with the token's query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.kernels.recurrent_contract import StateShape

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes. Channels of a token lie as queries, keys, values, head by head."""

    key_heads: int
    value_heads: int
    """A multiple of key_heads."""
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens that the convolution sees, at least 2."""
    tiled: bool
    """Value head h goes with key head h % key_heads; else neighbours share one."""
    by_channel: bool = False
    """Each row of a state decays by itself, not the whole of it alike."""
    lower_bound: float = 0.0
    """Negative: of the logarithm of what a step leaves, of which sigmoid(decay * step) is a part; 0: it is softplus(step) *
    decay."""

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def steps(self) -> int:
        """Numbers of a token that say how far its states decay: one per value head, or per row of its state."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

    @property
    def value_width(self) -> int:
        """Numbers of a token's values, and of its output."""
        return self.value_heads * self.value_dim

    @property
    def state(self) -> StateShape:
        """The last tokens' channels before the convolution, and a matrix per value head."""
        return StateShape(
            (self.conv_width - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """The parameters of a layer's rule, all float32.

    conv: [conv_width, channels], the oldest token's first; step_bias: [steps]; decay: [value_heads], negative; gain:
    [value_dim], of the norm of each head's output. sigmoid_gate: z's sigmoid multiplies what is read; else its SiLU.
    Positive decays go with a lower bound.
    """

    shape: DeltaShape
    conv: FloatArray
    step_bias: FloatArray
    decay: FloatArray
    gain: FloatArray
    epsilon: float
    sigmoid_gate: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInput:
    """A chunk's tokens, float32: mixed [T, channels], z [T, value_width], alpha [T, steps], beta [T, value_heads]."""

    mixed: FloatArray
    z: FloatArray
    alpha: FloatArray
    beta: FloatArray
