"""The slow twins of short convolutions, Mamba2 and the first Mamba, in NumPy and double. Know no native code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.recurrent_contract import (
        MambaRule,
        RecurrentStates,
        SelectiveInput,
        SelectiveRule,
        ShortConvRule,
    )
    from thermocline.kernels.weight import FloatArray, IntArray

    Doubles = NDArray[np.float64]


def short_convolution(
    rows: FloatArray, rule: ShortConvRule, runs: IntArray, states: RecurrentStates, out: FloatArray
) -> None:
    b, c, x = np.split(rows, 3, axis=1)
    for first, length, slot in runs.tolist():
        now = slice(first, first + length)
        out[now] = c[now] * _convolve(b[now] * x[now], rule.conv, states.conv[slot])


def mamba(
    rows: FloatArray, rule: MambaRule, runs: IntArray, states: RecurrentStates, out: FloatArray
) -> None:
    shape = rule.shape
    ends = np.cumsum((shape.width, shape.channels))
    z, channels, steps = np.split(rows, ends, axis=1)
    for first, length, slot in runs.tolist():
        now = slice(first, first + length)
        mixed = _silu(_convolve(channels[now], rule.conv, states.conv[slot]) + rule.conv_bias)
        for row, position in enumerate(range(first, first + length)):
            read = _step(rule, mixed[row], steps[position], states.recurrent[slot])
            out[position] = _output(rule, read, z[position])


def selective_convolution(
    rows: FloatArray, rule: SelectiveRule, runs: IntArray, states: RecurrentStates, out: FloatArray
) -> None:
    x = rows[:, : rule.shape.width]
    for first, length, slot in runs.tolist():
        now = slice(first, first + length)
        out[now] = _silu(_convolve(x[now], rule.conv, states.conv[slot]) + rule.conv_bias)


def selective_scan(
    given: SelectiveInput,
    rule: SelectiveRule,
    runs: IntArray,
    states: RecurrentStates,
    out: FloatArray,
) -> None:
    z = given.rows[:, rule.shape.width :].astype(np.float64)
    x = given.convolved.astype(np.float64)
    steps = np.logaddexp(0.0, given.steps.astype(np.float64) + rule.step_bias)
    for first, length, slot in runs.tolist():
        state = states.recurrent[slot, 0]  # [state_dim, width]
        for token in range(first, first + length):
            change = given.keys[token].astype(np.float64)[:, None] * (steps[token] * x[token])
            state[...] = state * np.exp(steps[token] * rule.decay) + change
            read = given.queries[token].astype(np.float64) @ state + rule.skip * x[token]
            out[token] = read * _silu(z[token])


def _convolve(fresh: FloatArray, conv: FloatArray, kept: FloatArray) -> Doubles:
    """Return the convolved rows; `kept`, the rows before them, becomes the last ones."""
    before = np.concatenate((kept, fresh))
    kept[...] = before[len(fresh) :]
    windows = np.lib.stride_tricks.sliding_window_view(before.astype(np.float64), len(conv), axis=0)
    convolved: Doubles = (windows * conv.T).sum(axis=-1)
    return convolved


def _step(rule: MambaRule, mixed: Doubles, steps: FloatArray, state: FloatArray) -> Doubles:
    """Move one sequence's state on by one token; return what it reads: [heads, head_dim]."""
    shape = rule.shape
    x = mixed[: shape.width].reshape(shape.heads, shape.head_dim)
    keys, queries = mixed[shape.width :].reshape(2, shape.groups, shape.state_dim)
    of_head = np.arange(shape.heads) // (shape.heads // shape.groups)
    step = np.logaddexp(0.0, steps.astype(np.float64) + rule.step_bias)[:, None]
    decay = np.exp(step[:, 0] * rule.decay)[:, None, None]
    state[...] = state * decay + keys[of_head][:, :, None] * (step * x)[:, None, :]
    read: Doubles = np.einsum("hnp,hn->hp", state, queries[of_head]) + x * rule.skip[:, None]
    return read


def _output(rule: MambaRule, read: Doubles, z: FloatArray) -> Doubles:
    groups = (read.reshape(-1) * _silu(z.astype(np.float64))).reshape(rule.shape.groups, -1)
    power = np.square(groups).mean(axis=-1, keepdims=True)
    normed: Doubles = (groups / np.sqrt(power + rule.epsilon)).reshape(-1) * rule.gain
    return normed


def _silu(x: Doubles) -> Doubles:
    with np.errstate(over="ignore"):
        silu: Doubles = x / (1.0 + np.exp(-x))
    return silu
