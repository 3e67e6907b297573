"""What tests of matrix products share: every implementation, weights of every type, guarded outputs.

Knows the kernels' interface and no kernel.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scripts.kquants import dequantize, quantize
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.native import load_native
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import (
    SUPPORTED_FORMATS,
    ExpertActivation,
    ExpertBiases,
    ExpertStack,
    ExpertWeights,
    SiluLimits,
    Weight,
    WeightStack,
)
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.contract import Kernels

PLAIN = ("BF16", "F16", "F32")
QUANTISED = tuple(sorted(SUPPORTED_FORMATS - set(PLAIN)))
FORMATS = (*PLAIN, *QUANTISED)
ISAS = tuple(name for name, available in load_native().instruction_sets() if available)
# These sets take the dense kernels of others, see native/src/isa.cpp: only `make schedules` runs them again.
SHARED_DENSE = {"avxvnni": "avx2", "amx": "avx512"}
DENSE_ISAS = tuple(
    name
    for name in ISAS
    if SHARED_DENSE.get(name) not in ISAS or "THERMOCLINE_SCHEDULES" in os.environ
)
TILE_ISAS = (*(name for name in ISAS if name == "amx"), *load_native().emulated_sets())

LIMITS = SiluLimits(4.0, 3.0)
"""Of experts with limits: both are reached in part of what tests multiply, most at the loud tokens."""

GUARD, GUARD_ROWS = np.float32(-12345.0), 3


class Implementation(NamedTuple):
    """The reference (no isa), or the native kernels on one instruction set with some threads."""

    isa: str | None
    threads: int

    def __str__(self) -> str:
        return f"{self.isa}-{self.threads}" if self.isa else "reference"

    def make(self) -> Kernels:
        """Return the kernels; native ones are made once and then shared."""
        return native(self.isa, self.threads) if self.isa else ReferenceKernels()


REFERENCE = Implementation(None, 1)
IMPLEMENTATIONS = (
    REFERENCE,
    *(Implementation(isa, threads) for isa in ISAS for threads in (1, 3)),
)


@cache
def native(isa: str, threads: int = 1) -> NativeKernels:
    """Return the native kernels of one instruction set; their threads sleep between tests."""
    return NativeKernels(isa, threads)


class GuardedMemory:
    """Stands in for np.empty: float32 arrays full of NaN, with guard rows before and behind them."""

    def __init__(self) -> None:
        self._empty = np.empty
        self._guards: list[np.ndarray] = []

    def empty(self, shape, dtype=float, order="C", **rest) -> np.ndarray:
        """Return what np.empty would; float32 arrays of two axes or more are guarded."""
        if np.dtype(dtype) != np.float32 or np.ndim(shape) == 0 or len(shape) < 2 or order != "C":
            return self._empty(shape, dtype, order, **rest)
        whole = self._empty((shape[0] + 2 * GUARD_ROWS, *shape[1:]), np.float32)
        inside = whole[GUARD_ROWS : GUARD_ROWS + shape[0]]
        whole.fill(GUARD)
        inside.fill(np.nan)
        self._guards += [whole[:GUARD_ROWS], whole[GUARD_ROWS + shape[0] :]]
        return inside

    def empty_like(self, other, dtype=None, **rest) -> np.ndarray:
        """Return what np.empty_like would, guarded as above."""
        return self.empty(other.shape, other.dtype if dtype is None else dtype)

    @property
    def used(self) -> bool:
        """Whether anything was guarded yet."""
        return bool(self._guards)

    def check(self) -> None:
        """Fail if a guard row was written to."""
        assert all((guard == GUARD).all() for guard in self._guards), (
            "written outside of the output"
        )


@cache
def usable_blocks(format_name: str) -> np.ndarray:
    """Return blocks [n, block_bytes] of random bytes whose weights are neither tiny nor huge."""
    info = FORMATS_BY_NAME[format_name]
    rng = np.random.default_rng(info.type_id)
    raw = rng.integers(0, 256, (6000, info.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        power = np.square(dequantize(raw, format_name).astype(np.float64)).mean(axis=1)
        usable = raw[(power > 0.1**2) & (power < 3.0**2)]
    assert len(usable) >= 20, f"{format_name}: too few usable blocks"
    return usable


def make_weight(rng, format_name: str, rows: int, cols: int) -> Weight:
    """Return a weight of any supported type: random numbers if plain, else random blocks."""
    info = FORMATS_BY_NAME[format_name]
    if format_name in PLAIN:
        raw = quantize(rng.standard_normal((rows, cols)).astype(np.float32), format_name)
    else:
        blocks = usable_blocks(format_name)
        picked = rng.integers(0, len(blocks), (rows, cols // info.block_elements))
        raw = blocks[picked].reshape(rows, -1)
    return Weight("w", info, np.ascontiguousarray(raw), cols)


def float_weight(values: np.ndarray) -> Weight:
    """Return float32 values [rows, cols] as a weight."""
    return Weight("w", FORMATS_BY_NAME["F32"], quantize(values, "F32"), values.shape[1])


def normal_weight(rng, format_name: str, rows: int, cols: int, gain: float = 1.0) -> Weight:
    """Return a weight as models have them: normal, of variance gain^2 / cols, quantised."""
    values = (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)
    return Weight("w", FORMATS_BY_NAME[format_name], quantize(values, format_name), cols)


def tokens_of(rng, tokens: int, cols: int) -> np.ndarray:
    """Return normal activations, float32 [tokens, cols]."""
    return rng.standard_normal((tokens, cols)).astype(np.float32)


def decoded(weight: Weight) -> np.ndarray:
    """Return the weight as the gguf package decodes it, in double: [rows, cols]."""
    return dequantize(weight.raw, weight.format.name).astype(np.float64)


def exact_product(weight: Weight, x: np.ndarray) -> np.ndarray:
    """Return x times the transposed weight in double: [tokens, rows]."""
    return x.astype(np.float64) @ decoded(weight).T


def make_expert(
    rng, formats: Sequence[str], hidden: int, intermediate: int, make=normal_weight
) -> ExpertWeights:
    """Return an expert; `formats` are those of gate, up and down."""
    gate, up, down = formats
    return ExpertWeights(
        make(rng, gate, intermediate, hidden),
        make(rng, up, intermediate, hidden),
        make(rng, down, hidden, intermediate),
    )


def stacked(experts: Sequence[ExpertWeights]) -> ExpertStack:
    """Return experts of the same types as the stack that a file holds."""

    def stack(weights: list[Weight]) -> WeightStack:
        assert len({weight.format for weight in weights}) == 1, (
            "a layer's experts share their types"
        )
        raw = np.stack([weight.raw for weight in weights])
        return WeightStack("w", weights[0].format, raw, weights[0].cols)

    return ExpertStack(
        stack([expert.gate for expert in experts]),
        stack([expert.up for expert in experts]),
        stack([expert.down for expert in experts]),
    )


def with_formula(
    rng, work: ExpertWork, activation: ExpertActivation, *, has_biases: bool
) -> ExpertWork:
    """Return the work with another formula, and random biases of its experts or none."""

    def bias(of: WeightStack) -> WeightStack:
        rows = of.raw.shape[1]
        numbers = rng.standard_normal((len(of), 1, rows)).astype(np.float32)
        return WeightStack("b", FORMATS_BY_NAME["F32"], numbers.view(np.uint8), rows)

    gate = work.stack.gate if activation.has_gate else None
    limits = LIMITS if activation is ExpertActivation.LIMITED_SILU else None
    stack = replace(work.stack, gate=gate, activation=activation, limits=limits)
    if has_biases:
        added = ExpertBiases(None if gate is None else bias(gate), bias(stack.up), bias(stack.down))
        stack = replace(stack, biases=added)
    return replace(work, stack=stack)


def expert_work(
    rng, experts: Sequence[ExpertWeights], pair_counts: Sequence[int], tokens: int
) -> ExpertWork:
    """Return work of sum(pair_counts) pairs on random tokens, with random weights."""
    pairs = sum(pair_counts)
    hidden = experts[0].gate.cols
    return ExpertWork(
        stacked(experts),
        np.arange(len(experts), dtype=np.int32),
        np.array(pair_counts, np.int32),
        tokens_of(rng, tokens, hidden),
        rng.integers(0, tokens, pairs).astype(np.int32),
        rng.uniform(0.1, 1.0, pairs).astype(np.float32),
    )


def routed_work(
    rng, experts: Sequence[ExpertWeights], tokens: int, slots: int
) -> tuple[ExpertWork, np.ndarray]:
    """Return work in which each token has `slots` different experts, and the pair of each slot."""
    chosen = np.stack([rng.permutation(len(experts))[:slots] for _ in range(tokens)])
    order = np.argsort(chosen.reshape(-1), kind="stable")
    pair_of = np.empty(tokens * slots, np.int32)
    pair_of[order] = np.arange(tokens * slots, dtype=np.int32)
    counts = np.bincount(chosen.reshape(-1), minlength=len(experts))
    work = expert_work(rng, experts, counts.tolist(), tokens)
    rows = (order // slots).astype(np.int32)
    return replace(work, rows=rows), pair_of.reshape(tokens, slots)


def exact_outputs(work: ExpertWork, first=np.float64, last=np.float64) -> np.ndarray:
    """Return scale * down(inner) in double, inner by the formula of the stack: [pairs, hidden].

    first, last: how operands of gate and up, and those of down, are rounded.
    """
    outs, start, stack = [], 0, work.stack
    for expert, count in zip(work.experts.tolist(), work.counts.tolist(), strict=True):
        pairs = slice(start, start + count)
        start += count
        x = work.x[work.rows[pairs]]
        up = exact_linear(stack.up, stack.biases and stack.biases.up, expert, x, first)
        gate = None
        if stack.gate is not None:
            bias = stack.biases and stack.biases.gate
            gate = exact_linear(stack.gate, bias, expert, x, first)
        inner = exact_inner(stack.activation, gate, up, stack.limits)
        out = exact_linear(stack.down, stack.biases and stack.biases.down, expert, inner, last)
        outs.append(out * work.scale[pairs, None])
    return np.concatenate(outs)


def exact_linear(
    stack: WeightStack, bias: WeightStack | None, expert: int, x, rounded=np.float64
) -> np.ndarray:
    """Return the product with one expert's matrix plus its bias, in double, of operands that are `rounded` first."""
    weights = decoded(stack[expert])
    out = rounded(x) @ rounded(weights).T * stack[expert].scale
    return out if bias is None else out + bias.raw[expert].view(np.float32)


def exact_inner(
    activation: ExpertActivation,
    g: np.ndarray | None,
    u: np.ndarray,
    limits: SiluLimits | None = None,
) -> np.ndarray:
    """Return the formula between the products, as papers and model code write it."""
    match activation:
        case ExpertActivation.SILU:
            return g / (1 + np.exp(-g)) * u
        case ExpertActivation.CLAMPED_SILU:
            g, u = np.minimum(g, 7), np.clip(u, -7, 7)
            return (u + 1) * g / (1 + np.exp(-1.702 * g))
        case ExpertActivation.GELU:
            return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
        case ExpertActivation.SQUARED_RELU:
            return np.where(u > 0, u, 0) ** 2
        case ExpertActivation.RELU:
            return np.where(g > 0, g, 0) * u
        case ExpertActivation.LIMITED_SILU:
            silu = g / (1 + np.exp(-g))
            silu[silu > limits.gate] = limits.gate
            return silu * np.sign(u) * np.minimum(np.abs(u), limits.up)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two float32 arrays hold the same bits."""
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
