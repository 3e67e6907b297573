"""The native dense kernels of one instruction set: allocates outputs, calls the compiled core.

The core releases the interpreter lock for the whole job, and checks shapes and ranges.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from thermocline.kernels.dense_contract import RopeTable
from thermocline.kernels.native import load_native
from thermocline.kernels.native_rules import NativeRules
from thermocline.kernels.recurrent_contract import ShortConvRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thermocline.kernels import _native
    from thermocline.kernels._native import Core, MatrixStack
    from thermocline.kernels.delta_contract import DeltaInput, DeltaRule
    from thermocline.kernels.dense_contract import (
        Activation,
        Attending,
        BalanceRule,
        Contributions,
        HeadNorm,
        LatentNorm,
        LayerCache,
        PostNorm,
        RoutingRule,
        Temperature,
        TokenRun,
    )
    from thermocline.kernels.recurrent_contract import (
        MambaRule,
        RecurrentStates,
        SelectiveInput,
        SelectiveRule,
    )
    from thermocline.kernels.weight import FloatArray, IntArray


_RunTables: TypeAlias = "tuple[IntArray, IntArray, IntArray]"


def _run_tables(runs: Sequence[TokenRun]) -> _RunTables:
    tables = [run.block_table for run in runs]
    end = runs[-1].start + runs[-1].length if runs else 0
    # One array of both: each call of NumPy costs a microsecond, and ten with cold caches.
    starts = [run.start for run in runs]
    both = np.array([*starts, end, 0, *accumulate(map(len, tables))], np.int32)
    return (
        both[: len(tables) + 1],
        np.concatenate(tables) if len(tables) != 1 else tables[0],
        both[len(tables) + 1 :],
    )


def num_expanded(runs: Sequence[TokenRun]) -> IntArray:
    """Return how many first tokens of each run take the expanded form."""
    return np.array([run.num_expanded for run in runs], np.int32)


class NativeDense:
    """`DenseKernels` on the compiled core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.rules = NativeRules()
        self._known_runs: tuple[tuple[Sequence[TokenRun], _RunTables], ...] = ()

    def __repr__(self) -> str:
        return f"NativeDense({self._core.isa})"

    def rms_norm(self, x: FloatArray, gain: FloatArray, epsilon: float) -> FloatArray:
        out = np.empty_like(x)
        self._core.rms_norm(x, gain, epsilon, out)
        return out

    def layer_norm(
        self, x: FloatArray, gain: FloatArray, epsilon: float, bias: FloatArray | None = None
    ) -> FloatArray:
        out = np.empty_like(x)
        self._core.layer_norm(x, gain, bias, epsilon, out)
        return out

    def rope_table(
        self,
        positions: IntArray,
        frequencies: NDArray[np.float64],
        *,
        magnitude: float = 1.0,
        pairs: bool = False,
    ) -> RopeTable:
        cosines = np.empty((len(positions), len(frequencies)), np.float32)
        sines = np.empty_like(cosines)
        self._core.rope_table(positions, frequencies, magnitude, cosines, sines)
        return RopeTable(cosines, sines, pairs)

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
        self._core.prepare_heads(
            q=q,
            k=k,
            v=v,
            q_gain=norm.q_gain,
            k_gain=norm.k_gain,
            epsilon=norm.epsilon,
            norm_last=norm.last,
            cosines=rope.cosines,
            sines=rope.sines,
            pairs=rope.pairs,
            cache_type=int(cache.shape.type),
            block_tokens=cache.shape.block_tokens,
            keys=cache.keys,
            values=cache.values,
            slots=slots,
            v_gain=norm.v_gain,
        )

    def prepare_latent(
        self,
        q: FloatArray,
        kv: FloatArray,
        norm: LatentNorm,
        rope: RopeTable,
        cache: LayerCache,
        slots: IntArray,
    ) -> None:
        self._core.prepare_latent(
            q=q,
            kv=kv,
            gain=norm.gain,
            epsilon=norm.epsilon,
            cosines=rope.cosines,
            sines=rope.sines,
            cache_type=int(cache.shape.type),
            block_tokens=cache.shape.block_tokens,
            keys=cache.keys,
            slots=slots,
        )

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
        out = np.empty((len(q), num_positions // step), np.float32)
        self._core.index_scores(
            q=q,
            weights=weights,
            block_table=block_table,
            cache_type=int(cache.shape.type),
            block_tokens=cache.shape.block_tokens,
            rows=cache.index[:, None],
            step=step,
            clips=clips,
            out=out,
        )
        return out

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
        starts, block_tables, table_starts = self.run_tables(runs)
        out = np.empty((*q.shape[:2], cache.shape.value_dim), np.float32)
        if cache.shape.latent:
            assert rule.chosen is None, "latent rows are all read"
            self._core.latent_attention(
                q=q,
                positions=positions,
                starts=starts,
                block_tables=block_tables,
                table_starts=table_starts,
                cache_type=int(cache.shape.type),
                block_tokens=cache.shape.block_tokens,
                keys=cache.keys,
                scale=rule.scale,
                softcap=rule.softcap,
                window=rule.window,
                sinks=rule.sinks,
                chunked=rule.chunked,
                temperature=self.native_temperature(rule.temperature),
                prompt=prompt,
                out=out,
            )
            return out
        chosen = rule.chosen
        if chosen is not None and chosen.ndim == 2:
            chosen = chosen[:, None]
        self._core.attention(
            q=q,
            positions=positions,
            starts=starts,
            block_tables=block_tables,
            table_starts=table_starts,
            cache_type=int(cache.shape.type),
            block_tokens=cache.shape.block_tokens,
            keys=cache.keys,
            values=cache.values,
            scale=rule.scale,
            softcap=rule.softcap,
            window=rule.window,
            sinks=rule.sinks,
            chunked=rule.chunked,
            temperature=self.native_temperature(rule.temperature),
            chosen=chosen,
            prompt=prompt,
            out=out,
        )
        return out

    def expanded_attention(
        self,
        up: tuple[MatrixStack, MatrixStack],
        q: FloatArray,
        positions: IntArray,
        runs: Sequence[TokenRun],
        cache: LayerCache,
        rule: Attending,
        *,
        prompt: bool = False,
    ) -> FloatArray:
        """See `Kernels.expanded_attention`. up: the heads' matrices for keys and for values."""
        assert rule.chosen is None, "latent rows are all read"
        assert rule.sinks is None, "the expanded form has no sinks"
        out = np.empty((*q.shape[:2], up[1].rows), np.float32)
        starts, block_tables, table_starts = self.run_tables(runs)
        self._core.expanded_attention(
            k_up=up[0],
            v_up=up[1],
            q=q,
            positions=positions,
            starts=starts,
            block_tables=block_tables,
            table_starts=table_starts,
            cache_type=int(cache.shape.type),
            block_tokens=cache.shape.block_tokens,
            keys=cache.keys,
            scale=rule.scale,
            temperature=self.native_temperature(rule.temperature),
            prompt=prompt,
            out=out,
        )
        return out

    def run_tables(self, runs: Sequence[TokenRun]) -> tuple[IntArray, IntArray, IntArray]:
        """Return where runs begin (and the last ends), their blocks in a row, and where those begin."""
        # All layers of a chunk share these runs; those with a window share others.
        for known, tables in self._known_runs:
            if known is runs:
                return tables
        tables = _run_tables(runs)
        self._known_runs = (*self._known_runs[-1:], (runs, tables))
        return tables

    def gate(self, x: FloatArray, gate: FloatArray, activation: Activation) -> FloatArray:
        out = np.empty_like(x)
        self._core.gate(x, gate, int(activation), out)
        return out

    def route(
        self, logits: FloatArray, rule: RoutingRule, given: IntArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        ids = np.empty((len(logits), rule.chosen), np.int32)
        weights = np.empty(ids.shape, np.float32)
        self._core.route(
            logits,
            int(rule.gating),
            rule.logit_bias,
            rule.bias,
            rule.groups,
            rule.groups_used,
            rule.group_best,
            rule.normalize,
            rule.min_sum,
            rule.scale,
            given,
            ids,
            weights,
        )
        return ids, weights

    def delta_rule(
        self,
        given: DeltaInput,
        rule: DeltaRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        self._core.delta_rule(
            self.rules.delta(rule),
            given.mixed,
            given.z,
            given.alpha,
            given.beta,
            runs,
            states.conv,
            states.recurrent,
            out,
        )

    def recur(
        self,
        rows: FloatArray,
        rule: ShortConvRule | MambaRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        if isinstance(rule, ShortConvRule):
            native = self.rules.short_conv(rule)
            self._core.short_convolution(native, rows, runs, states.conv, out)
        else:
            native_mamba = self.rules.mamba(rule)
            self._core.mamba(native_mamba, rows, runs, states.conv, states.recurrent, out)

    def selective_convolution(
        self,
        rows: FloatArray,
        rule: SelectiveRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        native = self.rules.selective(rule)
        self._core.selective_convolution(native, rows, runs, states.conv, out)

    def selective_scan(
        self,
        given: SelectiveInput,
        rule: SelectiveRule,
        runs: IntArray,
        states: RecurrentStates,
        out: FloatArray,
    ) -> None:
        self._core.selective_scan(
            self.rules.selective(rule),
            given.rows,
            given.convolved,
            given.steps,
            given.keys,
            given.queries,
            runs,
            states.recurrent,
            out,
        )

    def native_temperature(self, given: Temperature | None) -> _native.Temperature | None:
        """Return the factor as the core knows it."""
        if given is None:
            return None
        native: _native.Temperature = load_native().Temperature(
            scale=given.scale, length=given.length, offset=given.offset
        )
        return native

    def native_post_norm(self, norm: PostNorm | None) -> _native.PostNorm | None:
        """Return the norm as the core knows it."""
        if norm is None:
            return None
        first, second = norm.parts or (None, None)
        native: _native.PostNorm = load_native().PostNorm(
            gain=norm.gain,
            first_gain=first,
            second_gain=second,
            epsilon=norm.epsilon,
            scale=norm.scale,
        )
        return native

    def add_normed(
        self, x: FloatArray, first: FloatArray, second: FloatArray | None, norm: PostNorm
    ) -> FloatArray:
        out = np.empty_like(x)
        one, other = norm.parts or (None, None)
        self._core.add_normed(
            x, first, second, norm.gain, one, other, norm.epsilon, norm.scale, out
        )
        return out

    def softcap(self, x: FloatArray, cap: float) -> FloatArray:
        out = np.empty_like(x)
        self._core.softcap(x, cap, out)
        return out

    def take_streams(
        self, x: FloatArray, logits: FloatArray, rule: BalanceRule
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        tokens, count = len(x), rule.streams
        taken = np.empty((tokens, x.shape[1] // count), np.float32)
        rest = np.empty_like(x)
        shares = np.empty((tokens, count), np.float32)
        self._core.take_streams(
            x, logits, rule.base, rule.scales, rule.floor, rule.rounds, taken, rest, shares
        )
        return taken, rest, shares

    def pool_rows(self, rows: FloatArray, gates: FloatArray, places: FloatArray) -> FloatArray:
        out = np.empty((len(rows), rows.shape[2]), np.float32)
        self._core.pool_rows(rows, gates, places, out)
        return out

    def combine(
        self, residual: FloatArray, parts: Sequence[Contributions], num_slots: int
    ) -> FloatArray:
        out = np.empty_like(residual)
        arrays = [(part.rows, part.slots, part.values) for part in parts]
        self._core.combine(residual, arrays, num_slots, out)
        return out
