"""The dense parts that architectures share: rotary embedding and attention, out of kernels.

Each function treats every token by itself, so that results do not depend on the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.dense_contract import Attending, RopeTable

if TYPE_CHECKING:
    from thermocline.kernels.contract import FloatArray, IntArray, Kernels
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.whole_layer import AttentionWeights
    from thermocline.kv.pool import KVPool
    from thermocline.messages import Chunk, LayerIndex


# Positions of the first table; it doubles as contexts grow.
_FIRST_POSITIONS = 1024


class RotaryTable:
    """Cosines and sines by position; grows as far as positions go, so that a chunk only looks them up.

    Used by one thread at a time.
    """

    def __init__(self, dense: DenseKernels, num_dims: int, base: float) -> None:
        self._dense = dense
        self._frequencies = base ** (-np.arange(0, num_dims, 2, dtype=np.float64) / num_dims)
        self._rows = dense.rope_table(np.zeros(0, np.int32), self._frequencies)
        self._last: tuple[IntArray, RopeTable] | None = None

    def at(self, positions: IntArray) -> RopeTable:
        """Return the rows [tokens, num_dims / 2] of these positions.

        Every layer of a chunk asks with the same array, which must not change in between.
        """
        if self._last is None or self._last[0] is not positions:
            self._last = positions, self._look_up(positions)
        return self._last[1]

    def _look_up(self, positions: IntArray) -> RopeTable:
        known = len(self._rows.cosines)
        needed = int(positions.max(initial=-1)) + 1
        if needed > known:
            more = np.arange(known, max(needed, 2 * known, _FIRST_POSITIONS), dtype=np.int32)
            grown = self._dense.rope_table(more, self._frequencies)
            self._rows = RopeTable(
                np.concatenate((self._rows.cosines, grown.cosines)),
                np.concatenate((self._rows.sines, grown.sines)),
            )
        return RopeTable(self._rows.cosines[positions], self._rows.sines[positions])


def attend(
    kernels: Kernels,
    weights: AttentionWeights,
    rotary: RotaryTable,
    layer: LayerIndex,
    chunk: Chunk,
    x: FloatArray,
    pool: KVPool,
) -> FloatArray:
    """Return x [T, D] plus attention over it; appends the chunk's keys and values to `pool`."""
    num_tokens, dense, cache = len(x), kernels.dense, pool.layer(layer)
    normed = dense.rms_norm(x, weights.norm, weights.head_norm.epsilon)
    q, k, v = (
        heads.reshape(num_tokens, -1, cache.shape.head_dim)
        for heads in kernels.multiply_all(
            (weights.q, weights.k, weights.v), normed, prompt=chunk.is_prompt
        )
    )
    rope = rotary.at(chunk.positions)
    dense.prepare_heads(q, k, v, weights.head_norm, rope, cache, chunk.kv_slots)
    attended = dense.attention(q, chunk.positions, chunk.segments, cache, Attending(weights.scale))
    return kernels.matmul(
        weights.output, attended.reshape(num_tokens, -1), add=x, prompt=chunk.is_prompt
    )
