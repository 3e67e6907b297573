"""A cache of keys and values with random numbers in every slot."""

from __future__ import annotations

import numpy as np

from thermocline.kernels.cache_format import CacheShape, write_cache


def written_cache(shape: CacheShape, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values as bytes, of heads that are all written."""
    shapes = shape.array_shape, shape.value_shape
    keys, values = (np.zeros(each, np.uint8) for each in shapes)
    every = np.arange(shape.array_shape[0] * shape.block_tokens, dtype=np.int32)
    sizes = [(len(every), shape.kv_heads, dim) for dim in (shape.head_dim, shape.value_dim)]
    k, v = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    write_cache(shape, keys, values, every, k, v)
    return keys, values
