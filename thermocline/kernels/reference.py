"""The slow twin of every kernel, in NumPy, in the very order of additions that the contract fixes.

Weights are decoded by the gguf package, one matrix at a time, and nothing decoded is kept. Used by
tests as oracle, and by `--kernels reference`. Knows no native code.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from thermocline.kernels.cache_format import read_latent
from thermocline.kernels.dense_reference import ReferenceDense, attend_in_double
from thermocline.kernels.weight import ExpertActivation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.contract import ExpertWork
    from thermocline.kernels.dense_contract import Attending, LayerCache, TokenRun
    from thermocline.kernels.weight import (
        ByteArray,
        ExpertStack,
        FloatArray,
        HeadMatrices,
        IntArray,
        SiluLimits,
        Weight,
        WeightStack,
    )
    from thermocline.kernels.whole_step import PlacedParts

_LANES = 16
# What is computed at a time: intermediate values stay in a core's cache.
_DECODED_BYTES = 1 << 18
_PRODUCT_FLOATS = 1 << 16


def decode_blocks(raw: ByteArray, type_id: int) -> FloatArray:
    """Return float32 [rows, cols] of the rows `raw` [rows, row_bytes] of the ggml type `type_id`."""
    kind = GGMLQuantizationType(type_id)
    elements, size = GGML_QUANT_SIZES[kind]
    cols = raw.shape[1] // size * elements
    # Blocks know nothing of rows. The package takes sixteen rows at a time; one long row takes it a tenth.
    step = max(1, _DECODED_BYTES // max(1, raw.shape[1]))
    parts = [
        dequantize(np.ascontiguousarray(raw[start : start + step]).reshape(1, -1), kind)
        for start in range(0, max(1, len(raw)), step)
    ]
    decoded = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return np.ascontiguousarray(decoded.reshape(len(raw), cols), dtype=np.float32)


def _decoded(weight: Weight) -> FloatArray:
    """Return float32 [rows, cols] with the matrix's scale."""
    return decode_blocks(weight.raw, weight.format.type_id) * np.float32(weight.scale)


def ordered_products(weight: FloatArray, x: FloatArray) -> FloatArray:
    """Return [tokens, rows]: each of x [tokens, cols] times each row of weight [rows, cols].

    A product is sixteen running sums, folded in the order 8, 4, 2, 1.
    """
    if missing := -weight.shape[1] % _LANES:
        weight, x = (np.pad(each, [(0, 0), (0, missing)]) for each in (weight, x))
    # Rows are the last axis, along which NumPy computes fast.
    columns = np.ascontiguousarray(weight.T)[:, None]  # [cols, 1, rows]
    numbers = np.ascontiguousarray(x.T)[..., None]  # [cols, tokens, 1]
    lanes = np.zeros((_LANES, len(x), len(weight)), np.float32)
    products = np.empty_like(lanes)
    for start in range(0, len(columns), _LANES):
        lane = slice(start, start + _LANES)
        np.multiply(columns[lane], numbers[lane], out=products)
        lanes += products
    width = _LANES
    while width > 1:
        width //= 2
        lanes = lanes[:width] + lanes[width : 2 * width]
    total: FloatArray = lanes[0]
    return total


class ReferenceKernels:
    """`Kernels` in NumPy: exact, slow, and the judge of every other implementation.

    Prompts have no arithmetic of their own here.
    """

    @cached_property
    def dense(self) -> ReferenceDense:
        return ReferenceDense()

    @property
    def prompts_differ(self) -> bool:
        return False

    @cached_property
    def name(self) -> str:
        """Short name for reports."""
        return "reference"

    def timeline(self) -> None:
        """See `Kernels.timeline`: NumPy computes on the calling thread."""
        return

    def give_back_memory(self) -> None:
        """See `Kernels.give_back_memory`: nothing is kept."""

    @property
    def whole_layer(self) -> None:
        """See `Kernels.whole_layer`: the parts apart are the judge."""
        return

    def whole_step(self, layers: Sequence[PlacedParts]) -> None:
        """See `Kernels.whole_step`."""
        del layers

    def decode_rows(
        self, weight: Weight, rows: IntArray, *, may_be_missing: bool = False
    ) -> FloatArray:
        del may_be_missing
        decoded = decode_blocks(weight.raw[rows], weight.format.type_id)
        return decoded * np.float32(weight.scale)

    def multiply_all(
        self, weights: Sequence[Weight], x: FloatArray, *, prompt: bool = False
    ) -> tuple[FloatArray, ...]:
        return tuple(self.matmul(weight, x) for weight in weights)

    def matmul(
        self, weight: Weight, x: FloatArray, add: FloatArray | None = None, *, prompt: bool = False
    ) -> FloatArray:
        decoded = decode_blocks(weight.raw, weight.format.type_id)  # [rows, cols]
        out = np.empty((x.shape[0], weight.rows), np.float32)
        step = max(1, _PRODUCT_FLOATS // max(1, weight.rows * _LANES))
        for start in range(0, len(x), step):
            out[start : start + step] = ordered_products(decoded, x[start : start + step])
        out *= np.float32(weight.scale)
        return out if add is None else add + out

    def multiply_heads(self, weights: WeightStack, x: FloatArray) -> FloatArray:
        heads = [self.matmul(weights[head], x[:, head]) for head in range(len(weights))]
        return np.stack(heads, axis=1)

    def expanded_attention(
        self,
        up: HeadMatrices,
        q: FloatArray,
        positions: IntArray,
        runs: Sequence[TokenRun],
        cache: LayerCache,
        rule: Attending,
        *,
        prompt: bool = False,
    ) -> FloatArray:
        assert rule.chosen is None, "latent rows are all read"
        assert rule.sinks is None, "the expanded form has no sinks"

        def read(slots: IntArray) -> tuple[FloatArray, FloatArray]:
            rows = read_latent(cache.shape, cache.keys, slots)
            latent, rest = np.split(rows, [cache.shape.latent], axis=1)
            keys, values = [], []
            for head in range(len(up.keys)):
                made = latent @ (_decoded(up.keys[head]))
                keys.append(np.concatenate((made, rest), axis=1))
                values.append(latent @ _decoded(up.values[head]).T)
            return np.stack(keys, axis=1), np.stack(values, axis=1)

        return attend_in_double(q, positions, runs, cache.shape, rule, read)

    def expert_outputs(self, work: ExpertWork, *, prompt: bool = False) -> FloatArray:
        out = np.empty((len(work.rows), work.x.shape[1]), np.float32)
        start = 0
        for expert, count in zip(work.experts.tolist(), work.counts.tolist(), strict=True):
            pairs, biases = slice(start, start + count), work.stack.biases
            inner = self._inner(work.stack, expert, work.x[work.rows[pairs]])
            down = self.matmul(work.stack.down[expert], inner)
            if biases is not None:
                down += _bias(biases.down, expert)
            out[pairs] = down * work.scale[pairs, None]
            start += count
        return out

    def expert_sum(
        self, work: ExpertWork, pair_of: IntArray, residual: FloatArray, *, prompt: bool = False
    ) -> FloatArray:
        outputs = self.expert_outputs(work)
        total = outputs[pair_of[:, 0]]
        for slot in range(1, pair_of.shape[1]):
            total += outputs[pair_of[:, slot]]
        return total + residual

    def _inner(self, stack: ExpertStack, expert: int, x: FloatArray) -> FloatArray:
        up, gate = self.matmul(stack.up[expert], x), None
        if stack.biases is not None:
            up += _bias(stack.biases.up, expert)
        if stack.gate is not None:
            gate = self.matmul(stack.gate[expert], x)
            if stack.biases is not None and stack.biases.gate is not None:
                gate += _bias(stack.biases.gate, expert)
        return activate(stack.activation, gate, up, stack.limits)


def activate(
    activation: ExpertActivation,
    gate: FloatArray | None,
    up: FloatArray,
    limits: SiluLimits | None = None,
) -> FloatArray:
    """Return what an expert computes between its products. gate: None where the activation has none."""
    if gate is None:
        assert activation is ExpertActivation.SQUARED_RELU, "this activation has a gate"
        rectified: FloatArray = np.maximum(up, np.float32(0))
        return rectified * rectified
    wide = gate.astype(np.float64)
    if activation is ExpertActivation.CLAMPED_SILU:
        wide, up = np.minimum(wide, 7.0), np.clip(up, -7.0, 7.0) + np.float32(1)
    if activation is ExpertActivation.RELU:
        factor = np.maximum(wide, 0.0)
    elif activation is ExpertActivation.GELU:
        bent = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        factor = 0.5 * wide * (1.0 + np.tanh(bent))
    else:
        steepness = 1.702 if activation is ExpertActivation.CLAMPED_SILU else 1.0
        with np.errstate(over="ignore"):
            factor = wide / (1.0 + np.exp(-steepness * wide))
    if limits is not None:
        factor, up = np.minimum(factor, limits.gate), np.clip(up, -limits.up, limits.up)
    inner: FloatArray = factor.astype(np.float32) * up
    return inner


def _bias(stack: WeightStack, expert: int) -> FloatArray:
    """Return float32 [rows]."""
    numbers: FloatArray = decode_blocks(stack.raw[expert], stack.format.type_id)[0]
    return numbers
