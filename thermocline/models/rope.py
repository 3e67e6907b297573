"""The angles by which rotary embedding turns heads, YaRN's among them. Pure numbers; knows no table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Yarn:
    """Stretching of a trained context: slow dimensions are interpolated, fast ones stay."""

    factor: float
    """By how much the context is longer than the original one."""
    original_context: int
    beta_fast: float
    """Dimensions that turn more often over the original context stay as they are."""
    beta_slow: float
    """Those that turn less often are interpolated; between the two lies a ramp."""
    magnitude: float
    """Multiplies cosines and sines."""


@dataclass(frozen=True, slots=True)
class RopeRule:
    """Which first dimensions of a head turn, and how fast."""

    num_dims: int
    base: float
    yarn: Yarn | None = None

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.magnitude

    def frequencies(self) -> NDArray[np.float64]:
        """Return the angle per position of each pair of dimensions: [num_dims / 2]."""
        steps = np.arange(0, self.num_dims, 2, dtype=np.float64)
        plain: NDArray[np.float64] = self.base ** (-steps / self.num_dims)
        if self.yarn is None:
            return plain
        low = max(math.floor(self._dimension_of(self.yarn.beta_fast)), 0)
        high = min(math.ceil(self._dimension_of(self.yarn.beta_slow)), self.num_dims - 1)
        span = high - low or 0.001
        interpolated = np.clip((np.arange(len(plain)) - low) / span, 0.0, 1.0)
        stretched: NDArray[np.float64] = plain * (
            interpolated / self.yarn.factor + (1.0 - interpolated)
        )
        return stretched

    def _dimension_of(self, num_turns: float) -> float:
        """Return the pair that turns so often over the original context, as a fraction."""
        assert self.yarn is not None
        ratio = self.yarn.original_context / (num_turns * 2 * math.pi)
        return self.num_dims * math.log(ratio) / (2 * math.log(self.base))
