"""The slow twin of the dense kernels, in NumPy, mostly in double. Knows no native code."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import (
    read_cache,
    read_index,
    read_latent,
    write_cache,
    write_latent,
)
from thermocline.kernels.delta_reference import delta_rule
from thermocline.kernels.dense_contract import Activation, RopeTable
from thermocline.kernels.recurrent_contract import ShortConvRule
from thermocline.kernels.recurrent_reference import (
    mamba,
    selective_convolution,
    selective_scan,
    short_convolution,
)
from thermocline.kernels.routing_reference import route, sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from thermocline.kernels.cache_format import CacheShape
    from thermocline.kernels.delta_contract import DeltaInput, DeltaRule
    from thermocline.kernels.dense_contract import (
        Attending,
        BalanceRule,
        Contributions,
        HeadNorm,
        LatentNorm,
        LayerCache,
        PostNorm,
        RoutingRule,
        TokenRun,
    )
    from thermocline.kernels.recurrent_contract import (
        MambaRule,
        RecurrentStates,
        SelectiveInput,
        SelectiveRule,
    )
    from thermocline.kernels.weight import FloatArray, IntArray


class ReferenceDense:
    """`DenseKernels` in NumPy: the judge of every other implementation."""

    def rms_norm(self, x: FloatArray, gain: FloatArray, epsilon: float) -> FloatArray:
        mean_square = np.square(x.astype(np.float64)).mean(axis=-1, keepdims=True)
        scale = (1.0 / np.sqrt(mean_square + np.float32(epsilon))).astype(np.float32)
        normed: FloatArray = x * scale * gain
        return normed

    def layer_norm(
        self, x: FloatArray, gain: FloatArray, epsilon: float, bias: FloatArray | None = None
    ) -> FloatArray:
        wide = x.astype(np.float64)
        centred = (wide - wide.mean(axis=-1, keepdims=True)).astype(np.float32)
        normed = self.rms_norm(centred, gain, epsilon)
        return normed if bias is None else normed + bias

    def rope_table(
        self,
        positions: IntArray,
        frequencies: NDArray[np.float64],
        *,
        magnitude: float = 1.0,
        pairs: bool = False,
    ) -> RopeTable:
        angles = positions[:, None].astype(np.float64) * frequencies
        cosines, sines = np.cos(angles) * magnitude, np.sin(angles) * magnitude
        return RopeTable(cosines.astype(np.float32), sines.astype(np.float32), pairs)

    def prepare_heads(
        self,
        q: FloatArray,
        k: FloatArray | None,
        v: FloatArray | None,
        norm: HeadNorm,
        rope: RopeTable,
        cache: LayerCache,
        slots: IntArray,
    ) -> None:
        q[...] = self._turned(q, norm.q_gain, norm, rope)
        if k is None or v is None:
            return
        keys = self._turned(k, norm.k_gain, norm, rope)
        values = v if norm.v_gain is None else self.rms_norm(v, norm.v_gain, norm.epsilon)
        write_cache(cache.shape, cache.keys, cache.values, slots, keys, values)

    def _turned(
        self, x: FloatArray, gain: FloatArray | None, norm: HeadNorm, rope: RopeTable
    ) -> FloatArray:
        if gain is None:
            return _rotate(x, rope)
        if norm.last:
            return self.rms_norm(_rotate(x, rope), gain, norm.epsilon)
        return _rotate(self.rms_norm(x, gain, norm.epsilon), rope)

    def prepare_latent(
        self,
        q: FloatArray,
        kv: FloatArray,
        norm: LatentNorm,
        rope: RopeTable,
        cache: LayerCache,
        slots: IntArray,
    ) -> None:
        pairs, latent = replace(rope, pairs=True), cache.shape.latent
        turning = 2 * rope.cosines.shape[1]
        normed = self.rms_norm(kv[:, :latent], norm.gain, norm.epsilon)
        turned = _rotate(kv[:, None, latent:], pairs)[:, 0]
        rows = np.concatenate((normed, turned), axis=-1)
        write_latent(cache.shape, cache.keys, slots, rows)
        q[..., -turning:] = _rotate(q[..., -turning:], pairs)

    def index_scores(
        self,
        q: FloatArray,
        weights: FloatArray,
        block_table: IntArray,
        num_positions: int,
        cache: LayerCache,
        *,
        step: int = 1,
        clips: bool = True,
    ) -> FloatArray:
        assert cache.index is not None, "a cache without rows for an indexer"
        positions = np.arange(step - 1, num_positions, step)
        if positions.size == 0:
            return np.empty((len(q), 0), np.float32)
        blocks, places = np.divmod(positions, cache.shape.block_tokens)
        slots = (block_table[blocks] * cache.shape.block_tokens + places).astype(np.int32)
        rows = read_index(cache.shape, cache.index, slots).astype(np.float64)
        said = q.astype(np.float64) @ rows.T
        said = np.maximum(said, 0.0) if clips else said
        scores: FloatArray = np.einsum("th,thp->tp", weights, said).astype(np.float32)
        return scores

    def attention(
        self,
        q: FloatArray,
        positions: IntArray,
        runs: Sequence[TokenRun],
        cache: LayerCache,
        rule: Attending,
        *,
        prompt: bool = False,
    ) -> FloatArray:
        assert not (cache.shape.latent and rule.chosen is not None), "latent rows are all read"
        return attend_in_double(
            q, positions, runs, cache.shape, rule, partial(_keys_and_values, cache)
        )

    def gate(self, x: FloatArray, gate: FloatArray, activation: Activation) -> FloatArray:
        return x * _activated(gate.astype(np.float64), activation).astype(np.float32)

    def route(
        self, logits: FloatArray, rule: RoutingRule, given: IntArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        return route(logits, rule, given)

    def recur(
        self,
        rows: FloatArray,
        rule: ShortConvRule | MambaRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        if isinstance(rule, ShortConvRule):
            short_convolution(rows, rule, runs, states, out)
        else:
            mamba(rows, rule, runs, states, out)

    def selective_convolution(
        self,
        rows: FloatArray,
        rule: SelectiveRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        selective_convolution(rows, rule, runs, states, out)

    def selective_scan(
        self,
        given: SelectiveInput,
        rule: SelectiveRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        selective_scan(given, rule, runs, states, out)

    def delta_rule(
        self,
        given: DeltaInput,
        rule: DeltaRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        delta_rule(given, rule, runs, states, out)

    def add_normed(
        self, x: FloatArray, first: FloatArray, second: FloatArray | None, norm: PostNorm
    ) -> FloatArray:
        y = first
        if norm.parts is not None:
            assert second is not None, "a norm of two parts"
            one, other = norm.parts
            y = self.rms_norm(first, one, norm.epsilon) + self.rms_norm(second, other, norm.epsilon)
        elif second is not None:
            y = first + second
        return (x + self.rms_norm(y, norm.gain, norm.epsilon)) * np.float32(norm.scale)

    def softcap(self, x: FloatArray, cap: float) -> FloatArray:
        capped: FloatArray = (cap * np.tanh(x.astype(np.float64) / cap)).astype(np.float32)
        return capped

    def take_streams(
        self, x: FloatArray, logits: FloatArray, rule: BalanceRule
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        count, tokens = rule.streams, len(x)
        streams = x.reshape(tokens, count, x.shape[1] // count).astype(np.float64)
        scaled = logits.astype(np.float64) * np.repeat(rule.scales, (count, count, count * count))
        taking, giving, mixing = np.split(scaled + rule.base, (count, 2 * count), axis=1)
        matrix = _balanced(mixing.reshape(tokens, count, count), rule)
        taken = np.einsum("ti,tid->td", sigmoid(taking) + rule.floor, streams)
        rest = np.einsum("tij,tid->tjd", matrix, streams).reshape(x.shape)
        shares = 2 * sigmoid(giving)
        return taken.astype(np.float32), rest.astype(np.float32), shares.astype(np.float32)

    def pool_rows(self, rows: FloatArray, gates: FloatArray, places: FloatArray) -> FloatArray:
        logits = gates.astype(np.float64) + places
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        pooled: FloatArray = (powers * rows).sum(axis=1) / powers.sum(axis=1)
        return pooled.astype(np.float32)

    def combine(
        self, residual: FloatArray, parts: Sequence[Contributions], num_slots: int
    ) -> FloatArray:
        slots = np.empty((num_slots, *residual.shape), np.float32)
        for part in parts:
            slots[part.slots, part.rows] = part.values
        total: FloatArray = slots[0].copy()
        for slot in slots[1:]:
            total += slot
        return residual + total


def _balanced(logits: NDArray[np.float64], rule: BalanceRule) -> NDArray[np.float64]:
    """Return the matrices [tokens, streams, streams] that mix streams."""
    powers = np.exp(logits - logits.max(axis=2, keepdims=True))
    matrix: NDArray[np.float64] = powers / powers.sum(axis=2, keepdims=True) + rule.floor
    matrix /= matrix.sum(axis=1, keepdims=True) + rule.floor
    for _ in range(rule.rounds - 1):
        matrix /= matrix.sum(axis=2, keepdims=True) + rule.floor
        matrix /= matrix.sum(axis=1, keepdims=True) + rule.floor
    return matrix


def _activated(gate: NDArray[np.float64], activation: Activation) -> NDArray[np.float64]:
    if activation is Activation.SIGMOID:
        return sigmoid(gate)
    factor: NDArray[np.float64] = np.logaddexp(0.0, gate)
    if activation is Activation.GELU:
        twice = np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
        factor = gate * np.exp(-np.logaddexp(0.0, -twice))
    return factor


def attend_in_double(
    q: FloatArray,
    positions: IntArray,
    runs: Sequence[TokenRun],
    shape: CacheShape,
    rule: Attending,
    read: Callable[[IntArray], tuple[FloatArray, FloatArray]],
) -> FloatArray:
    """Return `DenseKernels.attention`. read: keys [slots, heads, head_dim] and values of slots, of fewer heads than q."""
    out = None
    for run in runs:
        rows = range(run.start, run.start + run.length)
        context = np.arange(int(positions[rows].max()) + 1 if run.length else 0)
        slots = run.block_table[context // shape.block_tokens] * shape.block_tokens
        keys, values = read(slots + context % shape.block_tokens)
        group = q.shape[1] // keys.shape[1]
        wide_keys = np.repeat(keys.astype(np.float64), group, axis=1)  # [context, heads, head_dim]
        wide_values = np.repeat(values.astype(np.float64), group, axis=1)
        if out is None:
            out = np.empty((*q.shape[:2], values.shape[2]), np.float32)
        for row in rows:
            seen = context <= positions[row]
            if rule.window:
                seen &= context >= _first_seen(int(positions[row]), rule)
            if rule.chosen is not None and rule.chosen.ndim == 2:
                seen &= _bits(rule.chosen[row], len(context))
            scores = np.einsum("phd,hd->ph", wide_keys[seen], q[row])
            scores *= rule.scale * _temperature(int(positions[row]), rule)
            if rule.chosen is not None and rule.chosen.ndim == 3:
                bits = np.array([_bits(words, len(context))[seen] for words in rule.chosen[row]])
                scores[~np.repeat(bits.T, group, axis=1)] = -np.inf
            out[row] = np.einsum("ph,phd->hd", _weights(scores, rule), wide_values[seen])
    assert out is not None, "a chunk has tokens"
    return out


def _first_seen(position: int, rule: Attending) -> int:
    """Return the first position that a token here sees, of a rule with a window; maybe one below 0."""
    if rule.chunked:
        return position // rule.window * rule.window
    return position + 1 - rule.window


def _temperature(position: int, rule: Attending) -> float:
    given = rule.temperature
    if given is None:
        return 1.0
    return 1.0 + given.scale * math.log(1 + (position + given.offset) // given.length)


def _keys_and_values(cache: LayerCache, slots: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim]."""
    shape = cache.shape
    if not shape.latent:
        return read_cache(shape, cache.keys, cache.values, slots)
    keys = read_latent(shape, cache.keys, slots)[:, None]
    return keys, keys[..., : shape.latent]


def _rotate(x: FloatArray, rope: RopeTable) -> FloatArray:
    """Return x [tokens, heads, head_dim] with its first dimensions turned."""
    half = rope.cosines.shape[1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = rope.cosines[:, None, :], rope.sines[:, None, :]
    if rope.pairs:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., :half], turning[..., half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    if rope.pairs:
        turned = np.stack((first, second), axis=-1).reshape(turning.shape)
    else:
        turned = np.concatenate((first, second), axis=-1)
    return np.concatenate((turned, rest), axis=-1)


def _bits(words: NDArray[np.uint16], count: int) -> NDArray[np.bool_]:
    """Return the first bits of a row of `Attending.chosen`."""
    return np.unpackbits(words.astype("<u2").view(np.uint8), count=count, bitorder="little") > 0


def _weights(scores: NDArray[np.float64], rule: Attending) -> NDArray[np.float64]:
    """Return the softmax of scores [context, heads] over the context, and over a sink where there is one."""
    if rule.softcap:
        scores = rule.softcap * np.tanh(scores / rule.softcap)
    top = scores.max(axis=0)
    if rule.sinks is not None:
        top = np.maximum(top, rule.sinks)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(axis=0)
    if rule.sinks is not None:
        total = total + np.exp(rule.sinks - top)
    weights: NDArray[np.float64] = exponentials / total
    return weights
