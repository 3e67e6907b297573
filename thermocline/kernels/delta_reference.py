"""The slow twin of the gated delta rule, in NumPy and double. Knows no native code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.delta_contract import DeltaInput, DeltaRule
    from thermocline.kernels.recurrent_contract import RecurrentStates
    from thermocline.kernels.weight import FloatArray, IntArray

_LENGTH_EPSILON = 1e-6


def delta_rule(
    given: DeltaInput, rule: DeltaRule, runs: IntArray, states: RecurrentStates, out: FloatArray
) -> None:
    for first, length, slot in runs.tolist():
        rows = slice(first, first + length)
        before = np.concatenate((states.conv[slot], given.mixed[rows]))
        states.conv[slot] = before[length:]
        for row, position in enumerate(range(first, first + length)):
            window = before[row : row + rule.shape.conv_width].astype(np.float64)
            mixed = _silu((window * rule.conv).sum(axis=0))
            read = _step(given, rule, position, mixed, states.recurrent[slot])
            out[position] = _output(rule, read, given.z[position])


def _step(
    given: DeltaInput, rule: DeltaRule, row: int, mixed: NDArray[np.float64], state: FloatArray
) -> NDArray[np.float64]:
    """Move one sequence's state on by one token; return what it reads: [value_heads, value_dim]."""
    shape = rule.shape
    key_width = shape.key_heads * shape.key_dim
    heads = np.arange(shape.value_heads)
    group = shape.value_heads // shape.key_heads
    of_head = heads % shape.key_heads if shape.tiled else heads // group
    q, k = (
        _unit(part.reshape(shape.key_heads, shape.key_dim))[of_head]
        for part in (mixed[:key_width], mixed[key_width : 2 * key_width])
    )
    v = mixed[2 * key_width :].reshape(shape.value_heads, shape.value_dim)
    step = given.alpha[row].astype(np.float64) + rule.step_bias
    # By head and row of its state, or one for all rows: [value_heads, key_dim or 1, 1].
    step, speed = step.reshape(shape.value_heads, -1, 1), rule.decay[:, None, None]
    if shape.lower_bound:
        decay = np.exp(shape.lower_bound * _sigmoid(step * speed))
    else:
        decay = np.exp(np.logaddexp(0.0, step) * speed)
    rate = _sigmoid(given.beta[row].astype(np.float64))
    decayed = state * decay
    change = (v - np.einsum("hkv,hk->hv", decayed, k)) * rate[:, None]
    state[...] = decayed + k[:, :, None] * change[:, None, :]
    read: NDArray[np.float64] = np.einsum("hkv,hk->hv", state, q) / np.sqrt(shape.key_dim)
    return read


def _output(rule: DeltaRule, read: NDArray[np.float64], z: FloatArray) -> NDArray[np.float64]:
    power = np.square(read).mean(axis=-1, keepdims=True)
    normed = read / np.sqrt(power + rule.epsilon) * rule.gain
    activate = _sigmoid if rule.sigmoid_gate else _silu
    gated: NDArray[np.float64] = normed.reshape(-1) * activate(z.astype(np.float64))
    return gated


def _unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = x / np.sqrt(
        np.square(x).sum(axis=-1, keepdims=True) + _LENGTH_EPSILON
    )
    return unit


def _silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x * _sigmoid(x)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        sigmoid: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x))
    return sigmoid
