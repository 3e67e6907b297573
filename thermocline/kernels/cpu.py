"""The native CPU implementation: checks nothing twice, allocates outputs, calls the compiled core.

The core releases the interpreter lock for the whole job. Knows no thread and no event loop.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.dense import NativeDense
from thermocline.kernels.dense_contract import Attending, TokenRun
from thermocline.kernels.native import load_native

if TYPE_CHECKING:
    from thermocline.kernels.contract import ExpertWeights, FloatArray, IntArray, KVView, Weight


class NativeKernels:
    """`Kernels` on the compiled core; bit-identical to the reference for every supported format."""

    def __init__(self) -> None:
        self._native = load_native()
        self._dense = NativeDense()

    @cached_property
    def name(self) -> str:
        """Short name for reports."""
        return "native"

    def decode_rows(self, weight: Weight, rows: IntArray) -> FloatArray:
        """See `Kernels.decode_rows`."""
        out = np.empty((len(rows), weight.cols), np.float32)
        self._native.decode_rows(weight.format.type_id, weight.raw, rows, out)
        return out

    def matmul(self, weight: Weight, x: FloatArray) -> FloatArray:
        """See `Kernels.matmul`."""
        out = np.empty((x.shape[0], weight.rows), np.float32)
        self._native.matmul(weight.format.type_id, weight.raw, x, out)
        return out

    def expert_ffn(
        self, expert: ExpertWeights, x: FloatArray, rows: IntArray, scale: FloatArray
    ) -> FloatArray:
        """See `Kernels.expert_ffn`."""
        out = np.empty((len(rows), x.shape[1]), np.float32)
        gate, up, down = expert.gate, expert.up, expert.down
        formats = (gate.format.type_id, up.format.type_id, down.format.type_id)
        self._native.expert_ffn(formats, gate.raw, up.raw, down.raw, x, rows, scale, out)
        return out

    def attention(
        self, q: FloatArray, kv: KVView, positions: IntArray, *, scale: float
    ) -> FloatArray:
        """See `Kernels.attention`."""
        run = TokenRun(0, len(q), kv.block_table)
        return self._dense.attention(q, positions, [run], kv.cache, Attending(scale))
