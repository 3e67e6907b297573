"""Mixers whose state moves on with every token, made of kernels: which state each sequence has, and when it is copied.

Each function treats every sequence by itself, so that results do not depend on the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.delta_contract import DeltaInput
from thermocline.kernels.recurrent_contract import RecurrentStates, SelectiveInput, SelectiveRule
from thermocline.kv.recurrent import clear_state, copy_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kernels.whole_layer import DeltaWeights, RecurrentWeights
    from thermocline.messages import Chunk


def apply_delta_rule(
    kernels: Kernels, weights: DeltaWeights, chunk: Chunk, x: FloatArray, states: RecurrentStates
) -> FloatArray:
    """Return x [T, D] plus the gated delta rule over it; updates the states of the chunk's sequences.

    Of weights with `NO_NORM` it is the rule's output alone.
    """
    dense, prompt = kernels.dense, chunk.is_prompt
    has_norm = len(weights.norm) > 0
    normed = dense.rms_norm(x, weights.norm, weights.rule.epsilon) if has_norm else x
    firsts = weights.z_low or weights.z, weights.alpha_low or weights.alpha
    products = (*weights.mixed, *firsts, weights.beta)
    *mixed, z, alpha, beta = kernels.multiply_all(products, normed, prompt=prompt)
    if weights.z_low is not None:
        z = kernels.matmul(weights.z, z, prompt=prompt)
    if weights.alpha_low is not None:
        alpha = kernels.matmul(weights.alpha, alpha, prompt=prompt)
    channels = mixed[0] if len(mixed) == 1 else np.concatenate(mixed, axis=1)
    given = DeltaInput(channels, z, alpha, beta)
    out = np.empty_like(given.z)
    for runs in run_rounds(chunk, states):
        dense.delta_rule(given, weights.rule, runs, states, out)
    return kernels.matmul(weights.output, out, add=x if has_norm else None, prompt=prompt)


def apply_recurrent(
    kernels: Kernels,
    weights: RecurrentWeights,
    chunk: Chunk,
    x: FloatArray,
    states: RecurrentStates,
) -> FloatArray:
    """Return x [T, D] plus the mixer's output over it; updates the states of the chunk's sequences."""
    dense, prompt = kernels.dense, chunk.is_prompt
    normed = dense.rms_norm(x, weights.norm, weights.epsilon)
    rows = kernels.matmul(weights.input, normed, prompt=prompt)
    rule, out = weights.rule, np.empty((len(x), weights.rule.shape.width), np.float32)
    if isinstance(rule, SelectiveRule):
        _select(kernels, weights, rule, chunk, rows, states, out)
    else:
        for runs in run_rounds(chunk, states):
            dense.recur(rows, rule, runs, states, out)
    return kernels.matmul(weights.output, out, add=x, prompt=prompt)


def _select(
    kernels: Kernels,
    weights: RecurrentWeights,
    rule: SelectiveRule,
    chunk: Chunk,
    rows: FloatArray,
    states: RecurrentStates,
    out: FloatArray,
) -> None:
    """Write what the first Mamba's last product takes to out [T, width].

    The convolution goes through all tokens before the products, and the scan behind them: each moves its own half of
    the states on, which is begun and copied with it.
    """
    dense, prompt, products = kernels.dense, chunk.is_prompt, weights.products
    assert products is not None, "the first Mamba has products of its own"
    convolved, nothing = np.empty_like(out), np.empty((len(states.conv), 0), np.float32)
    channels = RecurrentStates(states.conv, nothing)
    for runs in run_rounds(chunk, channels):
        dense.selective_convolution(rows, rule, runs, channels, convolved)
    firsts = kernels.multiply_all(products.firsts, convolved, prompt=prompt)
    low, keys, queries = (
        dense.rms_norm(first, gain, weights.epsilon)
        for first, gain in zip(firsts, products.gains, strict=True)
    )
    steps = kernels.matmul(products.steps, low, prompt=prompt)
    given = SelectiveInput(rows, convolved, steps, keys, queries)
    rest = RecurrentStates(nothing, states.recurrent)
    for runs in run_rounds(chunk, rest):
        dense.selective_scan(given, rule, runs, rest, out)


def begin_states(chunk: Chunk, states: RecurrentStates, level: int = 0) -> None:
    """Initialise each sequence's state slot for this chunk. level: of the branches that begin now."""
    for segment in chunk.places(window=False).segments:
        if segment.level != level:
            continue
        assert segment.state is not None, "a recurrent layer needs a state"
        if segment.state.load is not None:
            copy_state(states, segment.state.load, segment.state.slot)
        elif chunk.positions[segment.start] == 0:
            clear_state(states, segment.state.slot)


def cut_runs(chunk: Chunk, level: int = 0) -> IntArray:
    """Return the runs of a chunk, cut where snapshots are taken: int32 [n, 4], as for `RecurrentLayerInput`.

    level: of the branches that are meant.
    """
    runs = []
    for segment in chunk.places(window=False).segments:
        if segment.level != level:
            continue
        assert segment.state is not None, "a recurrent layer needs a state"
        cuts = [*segment.state.saves]
        if not cuts or cuts[-1][0] < segment.length:
            cuts.append((segment.length, -1))
        start = 0
        for end, target in cuts:
            runs.append((segment.start + start, end - start, segment.state.slot, target))
            start = end
    return np.array(runs, np.int32).reshape(-1, 4)


def run_rounds(chunk: Chunk, states: RecurrentStates) -> Iterator[IntArray]:
    """Begin the states, and yield the runs in rounds, a slot once in each; copy states after each round.

    Branches of a tree begin with copies of what those before them left.
    """
    num_levels = 1 + max(each.level for each in chunk.places(window=False).segments)
    for level in range(num_levels):
        begin_states(chunk, states, level)
        runs = cut_runs(chunk, level)
        slots = runs[:, 2]
        turns = np.array([np.count_nonzero(slots[:n] == slot) for n, slot in enumerate(slots)])
        for turn in range(int(turns.max(initial=-1)) + 1):
            mine = runs[turns == turn]
            yield np.ascontiguousarray(mine[:, :3])
            for source, target in mine[:, 2:].tolist():
                if target >= 0:
                    copy_state(states, source, target)
