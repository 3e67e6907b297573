"""A cache of keys and values with random numbers in every slot."""

from __future__ import annotations

import numpy as np

from thermocline.kernels.cache_format import CacheShape, write_cache


def written_cache(shape: CacheShape, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values as bytes, of heads that are all written."""
    keys, values = (np.zeros(shape.array_shape, np.uint8) for _ in range(2))
    every = np.arange(shape.array_shape[0] * shape.block_tokens, dtype=np.int32)
    size = (len(every), shape.kv_heads, shape.head_dim)
    k, v = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    write_cache(shape, keys, values, every, k, v)
    return keys, values
