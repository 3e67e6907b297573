"""The kernels as the benchmarks call them: the only file here that knows their interface.

Instruction sets are named as the kernels name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.native import load_native
from thermocline.kernels.weight import SUPPORTED_FORMATS, ExpertStack, Weight, WeightStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.weight import ByteArray, FloatArray, IntArray
    from thermocline.modelfile.formats import BlockFormat


@dataclass(frozen=True)
class LayerWeights:
    """All experts of one layer.

    gate, up: uint8 [experts, intermediate, row_bytes]; down: uint8 [experts, hidden, row_bytes].
    """

    gate: ByteArray
    up: ByteArray
    down: ByteArray
    formats: tuple[BlockFormat, BlockFormat, BlockFormat]
    hidden: int
    intermediate: int

    @cached_property
    def stack(self) -> ExpertStack:
        """The experts as the kernels take them."""
        gate, up, down = self.formats
        return ExpertStack(
            WeightStack("gate", gate, self.gate, self.hidden),
            WeightStack("up", up, self.up, self.hidden),
            WeightStack("down", down, self.down, self.intermediate),
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.stack[0].nbytes


def available_sets() -> tuple[str, ...]:
    """Return the instruction sets that this machine can run, the narrowest first."""
    return tuple(name for name, usable in load_native().instruction_sets() if usable)


def supported_formats() -> tuple[str, ...]:
    """Return the block types that the kernels compute from."""
    return tuple(sorted(SUPPORTED_FORMATS))


def matmul(weight: Weight, x: FloatArray, isa: str, threads: int) -> FloatArray:
    """Return x [tokens, cols] times the transposed weight, computed with instruction set `isa`."""
    return _kernels(isa, threads).matmul(weight, x)


def run_layer(
    layer: LayerWeights, x: FloatArray, expert_ids: IntArray, weights: FloatArray, threads: int
) -> FloatArray:
    """Return the weighted sum of each token's experts, float32 [tokens, hidden].

    x: [tokens, hidden]; expert_ids, weights: [tokens, used].
    """
    job = expert_job(
        _kernels("auto", threads), layer, Routed(x, expert_ids, weights), prompt=len(x) > 1
    )
    return job()


@dataclass(frozen=True, slots=True)
class Routed:
    """Inputs of a layer: x [tokens, hidden], expert_ids and weights [tokens, used]."""

    x: FloatArray
    expert_ids: IntArray
    weights: FloatArray

    def take(self, rows: IntArray) -> Routed:
        """Return these rows, in this order."""
        return Routed(self.x[rows], self.expert_ids[rows], self.weights[rows])


def expert_job(
    kernels: NativeKernels, layer: LayerWeights, given: Routed, *, prompt: bool = False
) -> Callable[[], FloatArray]:
    """Return what computes the weighted sum of each token's experts, float32 [tokens, hidden]."""
    chosen = given.expert_ids.reshape(-1)
    order = np.argsort(chosen, kind="stable").astype(np.int32)
    experts, counts = np.unique(chosen, return_counts=True)
    scale = np.ascontiguousarray(given.weights.reshape(-1)[order], np.float32)
    rows = order // np.int32(given.expert_ids.shape[1])
    work = ExpertWork(
        layer.stack, experts.astype(np.int32), counts.astype(np.int32), given.x, rows, scale
    )
    pair_of = np.empty(len(order), np.int32)
    pair_of[order] = np.arange(len(order), dtype=np.int32)
    table, residual = pair_of.reshape(given.expert_ids.shape), np.zeros_like(given.x)
    return partial(kernels.expert_sum, work, table, residual, prompt=prompt)


def exact_layer(
    layer: LayerWeights, x: FloatArray, expert_ids: IntArray, weights: FloatArray
) -> FloatArray:
    """Return what `run_layer` should: dequantised weights, double precision, a token at a time."""
    out = np.zeros(x.shape, np.float64)
    for token, (ids, scales) in enumerate(zip(expert_ids, weights, strict=True)):
        for index, scale in zip(ids.tolist(), scales.tolist(), strict=True):
            expert = layer.stack[index]
            assert expert.gate is not None, "these experts have gates"
            gate = exact_rows(expert.gate) @ x[token].astype(np.float64)
            up = exact_rows(expert.up) @ x[token].astype(np.float64)
            out[token] += scale * (exact_rows(expert.down) @ (gate / (1 + np.exp(-gate)) * up))
    return out.astype(np.float32)


def exact_rows(weight: Weight) -> FloatArray:
    """Return the dequantised weight, float32 [rows, cols]."""
    decoded: FloatArray = dequantize(weight.raw, GGMLQuantizationType(weight.format.type_id))
    return decoded


def relative_error(found: FloatArray, exact: FloatArray) -> float:
    """Return |found - exact| / |exact| over all elements."""
    miss = np.linalg.norm(found.astype(np.float64) - exact)
    return float(miss / np.linalg.norm(exact.astype(np.float64)))


@cache
def _kernels(isa: str, threads: int) -> NativeKernels:
    return NativeKernels(isa, threads)
