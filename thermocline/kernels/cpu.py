"""The native CPU implementation: checks nothing twice, allocates outputs, calls the compiled core.

The core releases the interpreter lock for the whole job. Knows no thread and no event loop.
"""

from __future__ import annotations

import time
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.codebooks import CODEBOOK_SHAPES, codebook_table
from thermocline.kernels.compressed_weights import CompressedWeights
from thermocline.kernels.cpu_topology import checked_threads
from thermocline.kernels.dense import NativeDense, num_expanded
from thermocline.kernels.dense_contract import Centering, LayerCache
from thermocline.kernels.instruction_sets import checked_instruction_set, has_tiles
from thermocline.kernels.machine_limits import MachineLimits
from thermocline.kernels.native import load_native
from thermocline.kernels.recurrent_contract import RecurrentStates
from thermocline.kernels.timeline import PoolTimeline
from thermocline.kernels.whole_layer import (
    AttentionWeights,
    DeltaWeights,
    LatentWeights,
    LayerInput,
    PlainLayerInput,
    RecurrentLayerInput,
    RecurrentWeights,
)
from thermocline.kernels.whole_step import NativeStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels import _native
    from thermocline.kernels._native import (
        Experts,
        HandoffPage,
        HandoffServer,
        LayerWeights,
        Matrix,
        MatrixStack,
        PlacedLayer,
        RoutedCall,
        StepGraph,
    )
    from thermocline.kernels.contract import ExpertWork
    from thermocline.kernels.dense_contract import Attending, TokenRun
    from thermocline.kernels.weight import (
        ByteArray,
        ExpertStack,
        FloatArray,
        HeadMatrices,
        IntArray,
        Weight,
        WeightStack,
    )
    from thermocline.kernels.whole_layer import (
        AnyLayerInput,
        LayerEmbedding,
        LayerParts,
        MoeWeights,
        OnRouted,
        SharedExpert,
    )
    from thermocline.kernels.whole_step import PlacedParts
    from thermocline.modelfile.formats import BlockFormat


# Long enough to be timed, short enough not to heat the machine.
_LIMIT_SECONDS = 0.05


def _norm_bias(centering: Centering | None) -> FloatArray | None:
    return None if centering is None else centering.bias


class NativeKernels:
    """`Kernels` on the compiled core: one instruction set, one pool of threads.

    isa: a name of `_native.instruction_sets()`, or "auto" for the widest one; threads: None for one per
    processor; pin: bind each to a processor. Raises ConfigError or NativeModuleError.
    """

    def __init__(self, isa: str = "auto", threads: int | None = None, *, pin: bool = False) -> None:
        native = load_native()
        self._native = native
        self._codebooks: set[str] = set()
        # What the core holds, by id of the Python object, which is kept so that its id stays unique.
        self._matrices: dict[int, tuple[Weight, Matrix]] = {}
        self._heads: dict[int, tuple[WeightStack, MatrixStack]] = {}
        self._stacks: dict[int, tuple[ExpertStack, Experts]] = {}
        self._layers: dict[int, tuple[LayerParts, LayerWeights]] = {}
        self._core = native.Core(
            checked_instruction_set(native, isa),
            checked_threads(threads),
            pin,
        )
        self.dense = NativeDense(self._core)

    @cached_property
    def name(self) -> str:
        """Short name for reports: instruction set and threads."""
        return f"{self._core.isa} x {self._core.threads}"

    @property
    def prompts_differ(self) -> bool:
        """See `Kernels.prompts_differ`: sets with matrix tiles use them for prompts."""
        return has_tiles(self._core.isa)

    def measure_limits(self, sample: Sequence[ByteArray]) -> MachineLimits:
        """Return what the threads reach now, reading `sample` (uint8, any shape) of the mapped file. Blocks."""
        read_s = min(
            self._seconds_to_read(sample) for _ in range(2)
        )  # the first may come from disk
        self._core.multiply_in_cache(1)
        rounds, spent_s, done = 8, 0.0, 0
        while spent_s < _LIMIT_SECONDS:
            rounds *= 2
            start = time.perf_counter()
            done = self._core.multiply_in_cache(rounds)
            spent_s = time.perf_counter() - start
        nbytes = sum(part.nbytes for part in sample)
        return MachineLimits(nbytes / read_s, done / spent_s, nbytes)

    def _seconds_to_read(self, sample: Sequence[ByteArray]) -> float:
        start = time.perf_counter()
        for part in sample:
            self._core.read_all(part.reshape(-1))
        return time.perf_counter() - start

    def give_back_memory(self) -> None:
        self._native.give_back_scratch()

    def timeline(self) -> PoolTimeline:
        return PoolTimeline(self._core)

    def decode_rows(
        self, weight: Weight, rows: IntArray, *, may_be_missing: bool = False
    ) -> FloatArray:
        out = np.empty((len(rows), weight.cols), np.float32)
        self._core.decode_rows(self._matrix(weight), rows, out, may_be_missing)
        if weight.scale != 1.0:
            out *= np.float32(weight.scale)
        return out

    def multiply_all(
        self, weights: Sequence[Weight], x: FloatArray, *, prompt: bool = False
    ) -> tuple[FloatArray, ...]:
        outs = [np.empty((x.shape[0], weight.rows), np.float32) for weight in weights]
        self._core.multiply_all([self._matrix(weight) for weight in weights], x, outs, None, prompt)
        return tuple(outs)

    def matmul(
        self, weight: Weight, x: FloatArray, add: FloatArray | None = None, *, prompt: bool = False
    ) -> FloatArray:
        out = np.empty((x.shape[0], weight.rows), np.float32)
        self._core.multiply_all([self._matrix(weight)], x, [out], add, prompt)
        return out

    def multiply_heads(self, weights: WeightStack, x: FloatArray) -> FloatArray:
        out = np.empty((*x.shape[:2], weights.raw.shape[1]), np.float32)
        self._core.multiply_heads(self._matrices_of(weights), x, out)
        return out

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
        matrices = self._matrices_of(up.keys), self._matrices_of(up.values)
        return self.dense.expanded_attention(
            matrices, q, positions, runs, cache, rule, prompt=prompt
        )

    def expert_outputs(self, work: ExpertWork, *, prompt: bool = False) -> FloatArray:
        out = np.empty((len(work.rows), work.x.shape[1]), np.float32)
        stack = self._stack(work.stack)
        pairs = work.experts, work.counts, work.x, work.rows, work.scale
        self._core.expert_outputs(stack, *pairs, out, prompt, work.may_be_missing)
        return out

    def expert_sum(
        self, work: ExpertWork, pair_of: IntArray, residual: FloatArray, *, prompt: bool = False
    ) -> FloatArray:
        out = np.empty_like(residual)
        stack = self._stack(work.stack)
        pairs = work.experts, work.counts, work.x, work.rows, work.scale
        self._core.expert_sum(stack, *pairs, pair_of, residual, out, prompt, work.may_be_missing)
        return out

    def whole_layer(
        self, parts: LayerParts, given: AnyLayerInput, on_routed: OnRouted | None = None
    ) -> tuple[FloatArray, IntArray, FloatArray]:
        out = np.empty_like(given.x)
        num_chosen = 0 if parts.routed is None else parts.routed.rule.chosen
        ids = np.empty((len(given.x), num_chosen), np.int32)
        weights = np.empty(ids.shape, np.float32)
        layer, outs = self._layer(parts), (out, ids, weights)
        routed = None
        if on_routed is not None:
            stream = np.empty_like(given.x)
            routed = self._native.RoutedCall(stream, partial(on_routed, ids, stream))
        match given:
            case RecurrentLayerInput():
                conv, states = given.states.conv, given.states.recurrent
                self._core.run_recurrent_layer(
                    layer, given.x, given.runs, conv, states, *outs, given.is_prompt, routed
                )
            case PlainLayerInput():
                self._core.run_plain_layer(layer, given.x, *outs, given.is_prompt, routed)
            case LayerInput():
                self._run_layer(layer, given, outs, routed)
        return outs

    def handoff(
        self, layers: Sequence[LayerParts], rows: int, chosen: int, hidden: int
    ) -> tuple[HandoffPage, HandoffServer]:
        """Return a page for steps of a device, and what computes the CPU's share of them; see kernels/handoff.py."""
        page = self._native.HandoffPage(len(layers), rows, chosen, hidden)
        weights = [self._layer(parts) for parts in layers]
        return page, self._native.HandoffServer(self._core, page, weights)

    def placed_layer(self, placed: PlacedParts) -> PlacedLayer:
        """Return a layer for `step_graph` and `whole_step`."""
        experts = None if placed.slots is None else self._stack(placed.slots)
        layer: PlacedLayer = self._native.PlacedLayer(
            self._layer(placed.parts), experts, placed.rope, placed.places
        )
        match placed.memory:
            case LayerCache(shape=shape, keys=keys, values=values):
                layer.attends(int(shape.type), shape.block_tokens, shape.head_dim, keys, values)
            case RecurrentStates(conv=conv, recurrent=recurrent):
                layer.recurs(conv, recurrent)
            case None:
                pass
        return layer

    def whole_step(self, layers: Sequence[PlacedParts]) -> NativeStep:
        natives = [self.placed_layer(layer) for layer in layers]
        step: _native.WholeStep = self._native.WholeStep(self._core, natives)
        return NativeStep(step, self.dense, layers)

    def step_graph(
        self, page: HandoffPage, layers: Sequence[PlacedLayer], bytes_per_s: float
    ) -> StepGraph:
        """Return a decode step through all layers as these threads compute it, playing a device."""
        graph: StepGraph = self._native.StepGraph(self._core, page, layers, bytes_per_s)
        return graph

    def _run_layer(
        self,
        layer: LayerWeights,
        given: LayerInput,
        outs: tuple[FloatArray, IntArray, FloatArray],
        routed: RoutedCall | None,
    ) -> None:
        tables, shape = self.dense.run_tables(given.runs), given.cache.shape
        if shape.latent:
            self._core.run_latent_layer(
                layer,
                given.x,
                given.positions,
                given.slots,
                given.rope.cosines,
                given.rope.sines,
                *tables,
                num_expanded(given.runs),
                int(shape.type),
                shape.block_tokens,
                given.cache.keys,
                *outs,
                given.is_prompt,
                routed,
            )
            return
        self._core.run_layer(
            layer,
            given.x,
            given.positions,
            given.slots,
            given.rope.cosines,
            given.rope.sines,
            given.rope.pairs,
            *tables,
            int(shape.type),
            shape.block_tokens,
            shape.head_dim,
            given.cache.keys,
            given.cache.values,
            *outs,
            given.is_prompt,
            given.embedded,
            routed,
        )

    def _layer(self, parts: LayerParts) -> LayerWeights:
        known = self._layers.get(id(parts))
        if known is None:
            attention, delta, recurrent, latent = None, None, None, None
            match parts.mixer:
                case LatentWeights():
                    latent = self._latent(parts.mixer)
                case AttentionWeights():
                    attention = self._attention(parts.mixer)
                case DeltaWeights():
                    delta = self._delta(parts.mixer)
                case RecurrentWeights():
                    recurrent = self._recurrent(parts.mixer)
                case None | CompressedWeights():  # these are computed by parts
                    pass
            layer = self._native.LayerWeights(
                attention=attention,
                delta=delta,
                recurrent=recurrent,
                latent=latent,
                norm=parts.norm,
                epsilon=parts.epsilon,
                routed=self._routed(parts.routed),
                shared=self._shared(parts.shared),
                end=self.dense.native_post_norm(parts.end),
                embedding=self._embedding(parts.embedding),
                handed_on=int(parts.handed_on),
                centers=parts.centering is not None,
                norm_bias=_norm_bias(parts.centering),
            )
            known = self._layers[id(parts)] = (parts, layer)
        return known[1]

    def _attention(self, weights: AttentionWeights) -> _native.AttentionWeights:
        norm, gate = weights.head_norm, weights.gate
        wide_q_gain, wide_k_gain = weights.wide_norm or (None, None)
        q_bias, k_bias, v_bias = weights.biases or (None, None, None)
        has_matrix = gate is not None and gate.weight is not None
        attention: _native.AttentionWeights = self._native.AttentionWeights(
            norm=weights.norm,
            q=self._matrix(weights.q),
            k=self._optional(weights.k),
            v=self._optional(weights.v),
            output=self._matrix(weights.output),
            q_gain=norm.q_gain,
            k_gain=norm.k_gain,
            wide_q_gain=wide_q_gain,
            wide_k_gain=wide_k_gain,
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            epsilon=norm.epsilon,
            norm_last=norm.last,
            scale=weights.scale,
            window=weights.window,
            chunked=weights.chunked,
            temperature=self.dense.native_temperature(weights.temperature),
            activation=0 if gate is None else int(gate.activation),
            gate_in_q=gate is not None and not has_matrix,
            gate=self._optional(None if gate is None else gate.weight),
            sinks=weights.sinks,
            output_bias=weights.output_bias,
            v_gain=norm.v_gain,
            post=self.dense.native_post_norm(weights.post_norm),
            centers=weights.centering is not None,
            norm_bias=_norm_bias(weights.centering),
            clip=weights.clip,
        )
        return attention

    def _embedding(self, part: LayerEmbedding | None) -> _native.EmbeddingWeights | None:
        if part is None:
            return None
        norm = self.dense.native_post_norm(part.norm)
        embedding: _native.EmbeddingWeights = self._native.EmbeddingWeights(
            gate=self._matrix(part.gate), up=self._matrix(part.up), norm=norm
        )
        return embedding

    def _latent(self, weights: LatentWeights) -> _native.LatentWeights:
        assert not weights.is_by_parts, "such a layer is computed part by part"
        low, norm = weights.low, weights.kv_norm
        latent: _native.LatentWeights = self._native.LatentWeights(
            norm=weights.norm,
            low=self._optional(None if low is None else low.weight),
            low_gain=None if low is None else low.gain,
            q=self._matrix(weights.q),
            kv=self._matrix(weights.kv),
            kv_gain=norm.gain,
            k_up=self._matrices_of(weights.up.keys),
            v_up=self._matrices_of(weights.up.values),
            output=self._matrix(weights.output),
            epsilon=norm.epsilon,
            scale=weights.scale,
            temperature=self.dense.native_temperature(weights.temperature),
            gate=self._optional(weights.gate),
        )
        return latent

    def _delta(self, weights: DeltaWeights) -> _native.DeltaWeights:
        delta: _native.DeltaWeights = self._native.DeltaWeights(
            norm=weights.norm,
            mixed=[self._matrix(part) for part in weights.mixed],
            z=self._matrix(weights.z),
            alpha=self._matrix(weights.alpha),
            beta=self._matrix(weights.beta),
            output=self._matrix(weights.output),
            z_low=self._optional(weights.z_low),
            alpha_low=self._optional(weights.alpha_low),
            rule=self.dense.rules.delta(weights.rule),
        )
        return delta

    def _recurrent(self, weights: RecurrentWeights) -> _native.RecurrentWeights:
        found, products = weights.products, None
        if found is not None:
            matrices = map(self._matrix, (*found.firsts, found.steps))
            products = self._native.SelectiveWeights(*matrices, *found.gains)
        recurrent: _native.RecurrentWeights = self._native.RecurrentWeights(
            norm=weights.norm,
            epsilon=weights.epsilon,
            input=self._matrix(weights.input),
            output=self._matrix(weights.output),
            rule=self.dense.rules.recurrent(weights.rule),
            products=products,
        )
        return recurrent

    def _routed(self, routed: MoeWeights | None) -> _native.RoutedExperts | None:
        if routed is None:
            return None
        rule = routed.rule
        experts: _native.RoutedExperts = self._native.RoutedExperts(
            router=self._matrix(routed.router),
            chosen=rule.chosen,
            normalize=rule.normalize,
            min_sum=rule.min_sum,
            scale=rule.scale,
            gating=int(rule.gating),
            logit_bias=rule.logit_bias,
            bias=rule.bias,
            groups=rule.groups,
            groups_used=rule.groups_used,
            group_best=rule.group_best,
            experts=self._stack(routed.stack),
            norm=None if routed.own is None else routed.own.router,
            experts_norm=None if routed.own is None else routed.own.experts,
            weighs_input=routed.weighs_input,
            down=self._optional(None if routed.around is None else routed.around.down),
            up=self._optional(None if routed.around is None else routed.around.up),
        )
        return experts

    def _shared(self, shared: SharedExpert | None) -> _native.SharedExpert | None:
        if shared is None:
            return None
        stack, gate = self._stack(shared.stack), self._optional(shared.gate)
        expert: _native.SharedExpert = self._native.SharedExpert(stack, gate)
        return expert

    def _optional(self, weight: Weight | None) -> Matrix | None:
        return None if weight is None else self._matrix(weight)

    def _matrix(self, weight: Weight) -> Matrix:
        known = self._matrices.get(id(weight))
        if known is None:
            type_id = self._type_id(weight.format)
            matrix = self._native.Matrix(type_id, weight.raw, weight.scale)
            known = self._matrices[id(weight)] = (weight, matrix)
        return known[1]

    def _matrices_of(self, stack: WeightStack) -> MatrixStack:
        known = self._heads.get(id(stack))
        if known is None:
            type_id = self._type_id(stack.format)
            matrices: MatrixStack = self._native.MatrixStack(type_id, stack.raw, stack.scales)
            known = self._heads[id(stack)] = (stack, matrices)
        return known[1]

    def _stack(self, stack: ExpertStack) -> Experts:
        known = self._stacks.get(id(stack))
        if known is None:
            gate = None if stack.gate is None else self._matrices_of(stack.gate)
            up, down = self._matrices_of(stack.up), self._matrices_of(stack.down)
            biases = [self._matrices_of(part) for part in stack.bias_parts]
            formula = int(stack.activation), biases, stack.limits
            known = self._stacks[id(stack)] = stack, self._native.Experts(gate, up, down, *formula)
        return known[1]

    def _type_id(self, block: BlockFormat) -> int:
        if block.name in CODEBOOK_SHAPES and block.name not in self._codebooks:
            self._native.set_codebook(block.type_id, codebook_table(block.name))
            self._codebooks.add(block.name)
        return block.type_id
