"""What attention to chosen positions shares, whatever it is of: the best of some scores, and turned heads of an indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.cache_format import CacheShape, CacheType
from thermocline.kernels.dense_contract import HeadNorm, LayerCache

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import DenseKernels, RopeTable
    from thermocline.kernels.weight import FloatArray, IntArray

SCORED_TOGETHER: Final = 32
"""Tokens whose scores are in memory at a time: 20 MiB in a context of 160,000."""


def best(scores: FloatArray, count: int) -> IntArray:
    """Return the places of the highest scores, ascending; of equal ones the first."""
    ranked = np.fmax(scores, -np.inf)  # what is not a number is the least
    least = np.partition(ranked, len(ranked) - count)[len(ranked) - count]
    taken = ranked > least
    ties = np.flatnonzero(ranked == least)
    taken[ties[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken).astype(np.int32)


def turn_heads(
    dense: DenseKernels,
    heads: FloatArray,
    rope: RopeTable,
    gain: FloatArray | None = None,
    epsilon: float = 0.0,
) -> None:
    """Turn the first numbers of heads [T, count, dim] in place. gain: float32 [dim], of an RMS norm before it."""
    tokens, _, dim = heads.shape
    shape = CacheShape(CacheType.F32, tokens, 1, 1, dim)  # nothing is written to it
    keys, values = (np.empty(each, np.uint8) for each in (shape.array_shape, shape.value_shape))
    nowhere, slots = LayerCache(shape, keys, values), np.arange(tokens, dtype=np.int32)
    dense.prepare_heads(heads, None, None, HeadNorm(gain, None, epsilon), rope, nowhere, slots)
