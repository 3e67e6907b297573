"""The dense parts that architectures share: norm, rotary embedding, attention. NumPy and kernels.

Each function treats every token by itself, so that results do not depend on the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thermocline.kernels.contract import FloatArray, IntArray, Kernels, Weight
    from thermocline.kv.pool import KVPool
    from thermocline.messages import Chunk, LayerIndex


def rms_norm(x: FloatArray, gain: FloatArray, epsilon: float) -> FloatArray:
    """Return x / sqrt(mean(x^2) + epsilon) * gain over the last axis; the mean is taken in double."""
    wide = x.astype(np.float64)
    mean_square = np.square(wide, out=wide).mean(axis=-1, keepdims=True)
    scale = (1.0 / np.sqrt(mean_square + epsilon)).astype(np.float32)
    normed: FloatArray = x * scale * gain
    return normed


class RotaryTable:
    """Rotary embedding in NeoX layout: dimension i turns with i + half."""

    def __init__(self, num_dims: int, base: float) -> None:
        self._frequencies = base ** (-np.arange(0, num_dims, 2, dtype=np.float64) / num_dims)

    def rotate(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """Return x [T, heads, num_dims] turned by each token's position; angles are in double."""
        angles = positions[:, None].astype(np.float64) * self._frequencies  # [T, num_dims / 2]
        cos = np.cos(angles).astype(np.float32)[:, None, :]
        sin = np.sin(angles).astype(np.float32)[:, None, :]
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's attention. Norm gains are float32; q_norm and k_norm [head_dim]."""

    norm: FloatArray
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    q_norm: FloatArray
    k_norm: FloatArray


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rms_epsilon: float


def attend(  # noqa: PLR0913 - an attention layer has these parts
    kernels: Kernels,
    weights: AttentionWeights,
    shape: AttentionShape,
    rotary: RotaryTable,
    layer: LayerIndex,
    chunk: Chunk,
    x: FloatArray,
    pool: KVPool,
) -> FloatArray:
    """Return x [T, D] plus attention over it; appends the chunk's keys and values to `pool`."""
    num_tokens = len(x)
    normed = rms_norm(x, weights.norm, shape.rms_epsilon)
    q, k, v = kernels.multiply_all((weights.q, weights.k, weights.v), normed)
    q = q.reshape(num_tokens, shape.num_heads, shape.head_dim)
    k = k.reshape(num_tokens, shape.num_kv_heads, shape.head_dim)
    v = v.reshape(num_tokens, shape.num_kv_heads, shape.head_dim)
    q = rotary.rotate(rms_norm(q, weights.q_norm, shape.rms_epsilon), chunk.positions)
    k = rotary.rotate(rms_norm(k, weights.k_norm, shape.rms_epsilon), chunk.positions)
    pool.write(layer, chunk.kv_slots, k, v)
    attended = np.empty((num_tokens, shape.num_heads * shape.head_dim), np.float32)
    for segment in chunk.segments:
        rows = slice(segment.start, segment.start + segment.length)
        out = kernels.attention(
            np.ascontiguousarray(q[rows]),
            pool.view(layer, segment.block_table),
            chunk.positions[rows],
            scale=shape.scale,
        )
        attended[rows] = out.reshape(segment.length, -1)
    return kernels.matmul(weights.output, attended, add=x)
