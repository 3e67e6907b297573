"""The slow twin of every kernel, in NumPy, in the very order of additions that the contract fixes.

Weights are decoded by the gguf package, one matrix at a time, and nothing decoded is kept. Used by
tests as oracle, and by `--kernels reference`. Knows no native code.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from thermocline.kernels.dense_contract import Attending, TokenRun
from thermocline.kernels.dense_reference import ReferenceDense

if TYPE_CHECKING:
    from thermocline.kernels.contract import (
        ByteArray,
        ExpertWeights,
        FloatArray,
        IntArray,
        KVView,
        Weight,
    )

_LANES = 16


def decode_blocks(raw: ByteArray, type_id: int) -> FloatArray:
    """Return float32 [rows, cols] of the rows `raw` [rows, row_bytes] of the ggml type `type_id`."""
    decoded = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(type_id))
    return np.ascontiguousarray(decoded, dtype=np.float32)


def fold_lanes(lanes: FloatArray) -> FloatArray:
    """Return [...]: the last axis of [..., 16] added in the order 8, 4, 2, 1."""
    width = _LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def ordered_dot(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return sum over the last axis of a * b (broadcast) as sixteen running sums, then folded."""
    cols = a.shape[-1]
    padding = -cols % _LANES
    if padding:
        a = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, padding)])
        b = np.pad(b, [(0, 0)] * (b.ndim - 1) + [(0, padding)])
    shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    lanes = np.zeros((*shape, _LANES), np.float32)
    for start in range(0, cols + padding, _LANES):
        lanes += a[..., start : start + _LANES] * b[..., start : start + _LANES]
    return fold_lanes(lanes)


class ReferenceKernels:
    """`Kernels` in NumPy: exact, slow, and the judge of every other implementation."""

    @cached_property
    def name(self) -> str:
        """Short name for reports."""
        return "reference"

    def decode_rows(self, weight: Weight, rows: IntArray) -> FloatArray:
        """See `Kernels.decode_rows`."""
        return decode_blocks(weight.raw[rows], weight.format.type_id)

    def matmul(self, weight: Weight, x: FloatArray) -> FloatArray:
        """See `Kernels.matmul`."""
        decoded = decode_blocks(weight.raw, weight.format.type_id)  # [rows, cols]
        out = np.empty((x.shape[0], weight.rows), np.float32)
        for token, row in enumerate(x):
            out[token] = ordered_dot(decoded, row)
        return out

    def expert_ffn(
        self, expert: ExpertWeights, x: FloatArray, rows: IntArray, scale: FloatArray
    ) -> FloatArray:
        """See `Kernels.expert_ffn`."""
        gathered = x[rows]  # [n, hidden]
        gate = self.matmul(expert.gate, gathered).astype(np.float64)
        with np.errstate(over="ignore"):
            silu = (gate / (1.0 + np.exp(-gate))).astype(np.float32)
        hidden = silu * self.matmul(expert.up, gathered)
        return self.matmul(expert.down, hidden) * scale[:, None]

    def attention(
        self, q: FloatArray, kv: KVView, positions: IntArray, *, scale: float
    ) -> FloatArray:
        """See `Kernels.attention`."""
        run = TokenRun(0, len(q), kv.block_table)
        return ReferenceDense().attention(q, positions, [run], kv.cache, Attending(scale))
