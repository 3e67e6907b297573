"""How fast this machine reads memory with some threads: the limit of decoding one token at a time.

The compiled core's own threads read a buffer that no cache holds.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from thermocline.kernels.native import load_native

BUFFER_BYTES: Final = 1 << 30  # far beyond any cache that one guest gets
_PASSES: Final = 3


class BandwidthProbe:
    """Measures with `threads` threads."""

    def __init__(self, threads: int, nbytes: int = BUFFER_BYTES) -> None:
        self._core = load_native().Core("portable", threads)
        self._buffer = np.ones(nbytes, np.uint8)

    def measure(self) -> float:
        """Return GB/s: the best of a few passes within some tenths of a second."""
        return self._buffer.nbytes / min(self._pass_s() for _ in range(_PASSES)) * 1e-9

    def _pass_s(self) -> float:
        start = time.perf_counter()
        self._core.read_all(self._buffer)
        return time.perf_counter() - start
