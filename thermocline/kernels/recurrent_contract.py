"""Recurrent mixers with one product before their rule and one behind: sizes, parameters, states. Knows no implementation.

A short convolution gives c * conv(b * x) by channel. Mamba2 has a state matrix [state_dim, head_dim] per head: every
token decays it, adds its values under the token's B, and reads it with the token's C. The first Mamba has one state matrix
[state_dim, width], each number of which decays by itself; it has products between its convolution and the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a recurrent layer keeps of a sequence, float32.

    conv: (tokens, channels), the last tokens' numbers before a convolution. heads: a matrix of each, (heads, rows,
    columns); all are 0 in a layer that has none.
    """

    conv: tuple[int, int]
    heads: tuple[int, int, int] = (0, 0, 0)

    @property
    def numbers(self) -> tuple[int, int]:
        """How many numbers `conv` and `heads` have."""
        return math.prod(self.conv), math.prod(self.heads)

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state in one layer."""
        return 4 * sum(self.numbers)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStates:
    """One layer's states by slot, float32; valid while their pool lives.

    conv: [slots, *StateShape.conv]; recurrent: [slots, *StateShape.heads].
    """

    conv: FloatArray
    recurrent: FloatArray


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """Sizes of a short convolution. A token's row: b, c and x, of `channels` numbers each."""

    channels: int
    conv_width: int
    """Tokens that the convolution sees, at least 2."""

    @property
    def row(self) -> int:
        """Numbers of a token's row."""
        return 3 * self.channels

    @property
    def width(self) -> int:
        """Numbers of a token's output."""
        return self.channels

    @property
    def state(self) -> StateShape:
        """The last tokens' b * x."""
        return StateShape((self.conv_width - 1, self.channels))


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Sizes of Mamba2. A token's row: z, then the channels (x, B, C), then a step per head."""

    heads: int
    head_dim: int
    groups: int
    """Neighbouring heads share a group's B and C; heads is a multiple of it."""
    state_dim: int
    conv_width: int
    """Tokens that the convolution sees, at least 2."""

    @property
    def width(self) -> int:
        """Numbers of a token's output, and of its z and x."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def row(self) -> int:
        """Numbers of a token's row."""
        return self.width + self.channels + self.heads

    @property
    def state(self) -> StateShape:
        """The last tokens' channels, and a matrix per head."""
        return StateShape(
            (self.conv_width - 1, self.channels), (self.heads, self.state_dim, self.head_dim)
        )


@dataclass(frozen=True, slots=True)
class SelectiveShape:
    """Sizes of the first Mamba. A token's row: x and z, of `width` numbers each."""

    width: int
    state_dim: int
    rank: int
    """Numbers that a token's steps are made of."""
    conv_width: int
    """Tokens that the convolution sees, at least 2."""

    @property
    def row(self) -> int:
        """Numbers of a token's row."""
        return 2 * self.width

    @property
    def state(self) -> StateShape:
        """The last tokens' x, and a matrix."""
        return StateShape((self.conv_width - 1, self.width), (1, self.state_dim, self.width))


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvRule:
    """The parameters of a short convolution. conv: float32 [conv_width, channels], the oldest token's first."""

    shape: ShortConvShape
    conv: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MambaRule:
    """The parameters of a layer's Mamba2, all float32.

    conv: [conv_width, channels], the oldest token's first; conv_bias: [channels]; step_bias, decay, skip: [heads],
    decay being negative and skip what of x is added to its output; gain: [width], of the norm of each group's output
    after it was multiplied by silu(z).
    """

    shape: MambaShape
    conv: FloatArray
    conv_bias: FloatArray
    step_bias: FloatArray
    decay: FloatArray
    skip: FloatArray
    gain: FloatArray
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveRule:
    """The parameters of a layer's first Mamba but for its products, all float32.

    conv: [conv_width, width], the oldest token's first; conv_bias, step_bias, skip: [width], skip being what of x is added
    to its output; decay: [state_dim, width], negative.
    """

    shape: SelectiveShape
    conv: FloatArray
    conv_bias: FloatArray
    step_bias: FloatArray
    decay: FloatArray
    skip: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveInput:
    """What the first Mamba's scan takes of some tokens, all float32.

    rows: [tokens, 2 * width], of which it takes z; convolved, steps: [tokens, width]; keys, queries: [tokens, state_dim],
    B and C.
    """

    rows: FloatArray
    convolved: FloatArray
    steps: FloatArray
    keys: FloatArray
    queries: FloatArray
