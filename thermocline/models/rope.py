"""Frequencies of rotary embedding, and their scaling for longer contexts.

Pure numbers; knows no table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN scaling: dimensions of low frequency are interpolated, those of high frequency stay."""

    factor: float
    """The context's length over the original one."""
    original_context: int
    beta_fast: float
    """Dimensions that turn more often over the original context stay as they are."""
    beta_slow: float
    """Those that turn less often are interpolated; between the two lies a ramp."""
    magnitude: float
    """Multiplies cosines and sines."""
    is_rounded: bool = True
    """Whether the ramp begins and ends at whole pairs of dimensions."""
    score_scale: float = 1.0
    """Multiplies the scores of latent attention, turned or not."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: every dimension turns `factor` times slower."""

    factor: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE: factors per pair, of which a file has two lists, for contexts up to the original one and for longer ones."""

    original_context: int
    magnitude: float
    """Multiplies cosines and sines, with either list."""


RopeScaling: TypeAlias = Yarn | LinearScaling | LongRope


@dataclass(frozen=True, slots=True)
class RopeRule:
    """Which first dimensions of a head turn, and how fast.

    pairs: dimension 2i turns with 2i + 1; else dimension i with i + num_dims / 2. factors: of each pair, by which it
    turns slower, before any scaling; none where all are 1.
    """

    num_dims: int
    base: float
    scaling: RopeScaling | None = None
    pairs: bool = False
    factors: tuple[float, ...] = ()

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines."""
        return self.scaling.magnitude if isinstance(self.scaling, Yarn | LongRope) else 1.0

    def frequencies(self) -> NDArray[np.float64]:
        """Return the angle per position of each pair of dimensions: [num_dims / 2]."""
        steps = np.arange(0, self.num_dims, 2, dtype=np.float64)
        plain: NDArray[np.float64] = self.base ** (-steps / self.num_dims)
        if self.factors:
            plain = plain / np.array(self.factors)
        match self.scaling:
            case None | LongRope():
                return plain
            case LinearScaling(factor=factor):
                return plain / factor
            case Yarn() as yarn:
                return plain * self._slowing(yarn)
            case _:
                assert_never(self.scaling)

    def _slowing(self, yarn: Yarn) -> NDArray[np.float64]:
        low = self._dimension_of(yarn, yarn.beta_fast)
        high = self._dimension_of(yarn, yarn.beta_slow)
        if yarn.is_rounded:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.num_dims - 1)
        span = high - low or 0.001
        interpolated = np.clip((np.arange(self.num_dims // 2) - low) / span, 0.0, 1.0)
        slowing: NDArray[np.float64] = interpolated / yarn.factor + (1.0 - interpolated)
        return slowing

    def _dimension_of(self, yarn: Yarn, num_turns: float) -> float:
        """Return the pair that turns so often over the original context, as a fraction."""
        ratio = yarn.original_context / (num_turns * 2 * math.pi)
        return self.num_dims * math.log(ratio) / (2 * math.log(self.base))
