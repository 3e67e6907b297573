"""A model's non-expert weights on a device: attention, routers and shared experts of all or some layers, and the head.

Owns the weights, cache and states of these layers. One thread at a time computes. In each layer the residual stream comes from
the host, and goes back with the experts' input in one copy. Additions are in the CPU's order wherever experts are
computed (docs/decisions/0015).
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from thermocline.errors import DeviceMemoryError
from thermocline.kernels.cache_format import CacheShape
from thermocline.kernels.gpu.cache import DeviceKVPool, DeviceStates
from thermocline.kernels.gpu.captured_rows import CapturedRows
from thermocline.kernels.gpu.dense import DeviceRope, softcap
from thermocline.kernels.gpu.layer import DeviceLayer, LayerOutput, load_norm, optional_vector
from thermocline.kernels.gpu.steps import CapturedSteps, RowSizes
from thermocline.kernels.gpu.weights import MatrixLoader
from thermocline.kernels.whole_layer import AttentionWeights, LatentWeights
from thermocline.messages import LayerEnding, LayerIndex, Routing
from thermocline.models.device.cache_places import BlockStrides
from thermocline.models.device.part import DevicePart
from thermocline.models.device.steps import SparePlaces, StepRules, plan_step
from thermocline.models.routing import Routed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.gpu.cache import DeviceLayerCache
    from thermocline.kernels.gpu.resident import LayerExperts
    from thermocline.kernels.gpu.shared_experts import SharedExperts
    from thermocline.kernels.gpu.step import StepInputs
    from thermocline.kernels.gpu.steps import HostOutput, LayerCompute, StepBuffers
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray
    from thermocline.kv.cache import KVCacheSpec
    from thermocline.messages import Chunk, ChunkId
    from thermocline.models.contract import Model, NonExpertParts
    from thermocline.models.device.steps import StepPlan
    from thermocline.models.rope import RopeRule
    from thermocline.models.spec import ModelSpec

# Of what a shape's buffers compute: all layers with all experts, or with those that are here.
_WHOLE, _SHARED = 0, 1
# Chunks in flight whose plans are kept; a dropped plan is made again.
_MAX_BEGUN = 8


class _Head:
    """The last norm, and the matrix of logits, on a device."""

    def __init__(self, load: MatrixLoader, parts: NonExpertParts, spec: ModelSpec) -> None:
        self._norm = load_norm(load, parts.output_norm, spec.rms_epsilon, parts.centering)
        self._output, self._cap = load.matrix(parts.output), spec.logit_softcap
        self._bias = optional_vector(load, parts.output_bias)

    def __call__(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Return the logits [rows, V] of the residual stream [rows, D]."""
        logits = self._output.multiply(self._norm(x), prompt=prompt)
        if self._bias is not None:
            logits = logits + self._bias
        return softcap(logits, self._cap) if self._cap else logits


class DeviceNonExpert:
    """Attention, router, shared experts and head of a model on one device, as far as they are its `part`."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        streams: DeviceStreams,
        cache: KVCacheSpec,
        part: DevicePart | None = None,
        *,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Load the weights, then take the cache, of just this size. part: None for all layers and the head.

        memory: uint8, for the keys and values of layers that keep all tokens; None to take it. Experts may have what of
        it no request has. Raises DeviceMemoryError for too small a device.
        """
        self.spec = model.spec
        self._streams = streams
        spec, parts = model.spec, model.non_expert
        self.part = part = part or DevicePart.whole(spec.num_layers)
        with streams.computing():
            load = MatrixLoader(streams, kernels.decode_rows)
            rules = {layer: parts.ropes[layer] for layer in part.layers}
            num_positions = cache.min_blocks * cache.block_tokens
            ropes = _rope_tables(kernels, load, rules.values(), num_positions)
            self._layers = {
                LayerIndex(layer): DeviceLayer(
                    load,
                    parts.layers[layer],
                    None if rule is None else ropes[rule],
                    spec.kv_shapes[layer].head_dim,
                )
                for layer, rule in rules.items()
            }
            self._head = _Head(load, parts, spec) if part.has_head else None
            self._states = {
                layer: DeviceStates(streams, cache.num_state_slots + 1, spec.state)
                for layer in spec.recurrent_layers
                if spec.state is not None and layer in self._layers
            }
            pools = _take_cache(streams, spec, cache, part, memory)
            self._caches = pools[0].layers | pools[1].layers
            streams.finish(spin=False)
        mixers = [parts.layers[layer].mixer for layer in part.layers]
        windows = {mixer.window for mixer in mixers if isinstance(mixer, AttentionWeights)}
        windows |= {0 for mixer in mixers if isinstance(mixer, LatentWeights)}
        # The last of each is no request's.
        self.spare = SparePlaces(cache.num_blocks, cache.window_blocks, cache.num_state_slots)
        self.num_blocks = cache.num_blocks
        """Blocks of the cache that requests may have."""
        self.block_tokens = cache.block_tokens
        self.is_recurrent = bool(self._states)
        self.context_tokens = cache.min_blocks * cache.block_tokens
        self._strides = BlockStrides(cache.block_tokens, *(pool.stride for pool in pools))
        self._rules = StepRules(
            tuple(sorted(windows)),
            cache.block_tokens,
            cache.min_blocks,
            self.is_recurrent,
            self._strides.spare(self.spare),
        )
        chosen = [layer.num_chosen for layer in self._layers.values()]
        # A step through all layers returns each layer's chosen experts.
        self._num_chosen = sum(chosen)
        hidden = spec.hidden_size
        self._dense = kernels.dense
        self._ends = {layer: parts.layers[layer].end for layer in self._layers}
        kept = 2 if any(self._ends.values()) else 0
        self._captured = CapturedSteps(streams, RowSizes(hidden, max(chosen, default=0), kept))
        self._whole = CapturedSteps(streams, RowSizes(hidden, self._num_chosen))
        self._few_logits = CapturedRows(streams, partial(self._logits, prompt=False), "logits")
        self._begun: OrderedDict[ChunkId, tuple[StepPlan, StepBuffers]] = OrderedDict()
        self._sharing: SharedExperts | None = None

    def __repr__(self) -> str:
        return f"DeviceNonExpert({self._streams}, {len(self._layers)} layers, {self._captured})"

    @property
    def num_captured(self) -> int:
        """Graphs of decode steps: of a layer, of all layers at once, or of the head."""
        steps = self._captured.num_captured + self._whole.num_captured
        return steps + self._few_logits.num_captured

    def attend_and_route(self, layer: LayerIndex, chunk: Chunk, x: FloatArray) -> Routed:
        """Return `Model.attend` and `Model.route` of x [T, D] in one. Raises DeviceMemoryError."""
        with self._computing():
            plan, step = self._step(chunk)
            given, states = self._layers[layer], self._states.get(layer)
            memory = self._memory(layer)
            changed = () if states is None else (states,)
            _begin(plan, changed)
            step.run(layer, partial(given, memory), x)
            _save(plan, changed)
            out = step.fetch(given.num_chosen, spin=not chunk.is_prompt)
            if layer == self.part.layers[-1]:
                del self._begun[chunk.id]
            routing = Routing(out.ids, out.weights)
            return Routed(out.residual, out.x, routing, self._ending(layer, out))

    def _ending(self, layer: LayerIndex, out: HostOutput) -> LayerEnding | None:
        """Return what the CPU does with the experts' sum of a layer that norms it."""
        end = self._ends[layer]
        if end is None or not out.ids.shape[1]:
            return None
        stream, shared = out.kept
        return LayerEnding(stream, partial(self._dense.add_normed, stream, shared, norm=end))

    def all_layers(
        self, chunk: Chunk, x: FloatArray, experts: LayerExperts
    ) -> tuple[FloatArray, dict[LayerIndex, Routing]]:
        """Return x [T, D] after the last layer, and the routing of each layer with routed experts; all are here, or come.

        Raises DeviceMemoryError.
        """
        with self._computing():
            out = self._run_all(_WHOLE, partial(self._through_layers, experts), chunk, x, experts)
        routings, start = {}, 0
        for index, layer in self._layers.items():
            if layer.num_chosen:
                mine = slice(start, start + layer.num_chosen)
                start += layer.num_chosen
                routings[index] = Routing(
                    np.ascontiguousarray(out.ids[:, mine]),
                    np.ascontiguousarray(out.weights[:, mine]),
                )
        return out.x, routings

    def shared_layers(self, chunk: Chunk, x: FloatArray, experts: SharedExperts) -> FloatArray:
        """Return x [T, D] after the last layer of a decode step. The routing is on the page.

        Raises DeviceMemoryError, and GivenUpError for a step that was.
        """
        with self._computing():
            if (
                self._sharing is not experts
            ):  # another page: what was captured writes to the old one
                self._streams.finish(spin=False)
                self._whole.clear()
                self._sharing = experts
            compute = partial(self._through_shared_layers, experts)
            return self._run_all(_SHARED, compute, chunk, x, experts).x

    def head(self, x: FloatArray, *, prompt: bool) -> FloatArray:
        """See `Model.head`. Raises DeviceMemoryError."""
        with self._computing():
            if not prompt:
                return self._few_logits(x, spin=True)
            logits = self._logits(self._streams.upload(x), prompt=True)
            return self._streams.to_host(logits, spin=False)

    def _logits(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        assert self._head is not None, "the head is not on the device"
        return self._head(x, prompt=prompt)

    def forget(self) -> None:
        """Release buffers and captured graphs, which are made again where they are needed."""
        self._captured.clear()
        self._whole.clear()
        self._few_logits.clear()
        self._begun.clear()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute on the device; buffers that can be made again are released when memory runs out."""
        try:
            with self._streams.computing():
                yield
        except DeviceMemoryError:
            self.forget()
            raise

    def _run_all(
        self, index: int, compute: LayerCompute, chunk: Chunk, x: FloatArray, experts: LayerExperts
    ) -> HostOutput:
        """Compute all layers; `compute` is the same for an index."""
        plan = plan_step(self._strides.chunk(chunk), self._rules)
        step = self._whole.step(plan.shape, recurs=plan.recurs, saves=plan.saves)
        step.use(plan.numbers)
        experts.upload()
        _begin(plan, self._states.values())
        step.run(index, compute, x)
        _save(plan, self._states.values())
        return step.fetch(self._num_chosen, spin=not chunk.is_prompt)

    def _through_shared_layers(
        self, experts: SharedExperts, x: torch.Tensor, inputs: StepInputs
    ) -> LayerOutput:
        experts.page.begin()
        out = self._through_layers(experts, x, inputs)
        experts.page.end()
        return out

    def _through_layers(
        self, experts: LayerExperts, x: torch.Tensor, inputs: StepInputs
    ) -> LayerOutput:
        ids, weights = [], []
        for index, layer in self._layers.items():
            given = layer(self._memory(index), x, inputs)
            x = experts.sum(index, given, inputs.num_live, prompt=inputs.is_prompt)
            x = layer.finish(given, x)
            if given.ids is not None and given.weights is not None:
                ids.append(given.ids)
                weights.append(given.weights)
        if not ids:  # all layers are dense
            return LayerOutput(x, x, None, None)
        return LayerOutput(x, x, torch.cat(ids, 1), torch.cat(weights, 1))

    def _memory(self, layer: LayerIndex) -> DeviceLayerCache | DeviceStates | None:
        """Return a layer's states or cache; None where it has neither."""
        return self._states.get(layer) or self._caches.get(layer)

    def _step(self, chunk: Chunk) -> tuple[StepPlan, StepBuffers]:
        """Return the chunk's plan, and buffers that hold its numbers."""
        begun = self._begun.get(chunk.id)
        if begun is None:
            plan = plan_step(self._strides.chunk(chunk), self._rules)
            step = self._captured.step(plan.shape, recurs=plan.recurs, saves=plan.saves)
            while len(self._begun) >= _MAX_BEGUN:
                self._begun.popitem(last=False)
            begun = self._begun[chunk.id] = plan, step
        plan, step = begun
        step.use(plan.numbers)
        return plan, step


def _begin(plan: StepPlan, changed: Iterable[DeviceStates]) -> None:
    for states in changed:
        for slot, source in plan.begins:
            states.begin(slot, source)


def _save(plan: StepPlan, changed: Iterable[DeviceStates]) -> None:
    """Copy the states to save of a step that may be captured; other steps do so themselves."""
    if plan.recurs:
        for states in changed:
            for source, target in chain.from_iterable(plan.saves):
                states.copy(source, target)


def _rope_tables(
    kernels: Kernels, load: MatrixLoader, rules: Iterable[RopeRule | None], num_positions: int
) -> dict[RopeRule, DeviceRope]:
    positions = np.arange(num_positions, dtype=np.int32)
    tables = {}
    for rule in {rule for rule in rules if rule is not None}:
        table = kernels.dense.rope_table(
            positions, rule.frequencies(), magnitude=rule.magnitude, pairs=rule.pairs
        )
        cosines, sines = load.vector(table.cosines), load.vector(table.sines)
        tables[rule] = DeviceRope(cosines, sines, table.pairs)
    return tables


def _take_cache(
    streams: DeviceStreams,
    spec: ModelSpec,
    cache: KVCacheSpec,
    part: DevicePart,
    memory: torch.Tensor | None,
) -> tuple[DeviceKVPool, DeviceKVPool]:
    """Return the cache of the part's layers that keep all tokens, and of those with a window.

    Each has a block more, for rows of padding.
    """
    windows = set(spec.window_layers if cache.window_blocks else ())
    full = [n for n in part.layers if n not in windows.union(spec.keyless_layers)]
    near = [n for n in part.layers if n in windows]
    return (
        DeviceKVPool(streams, _shape(spec, cache, cache.num_blocks, full), full, memory),
        DeviceKVPool(streams, _shape(spec, cache, cache.window_blocks, near), near),
    )


def _shape(
    spec: ModelSpec, cache: KVCacheSpec, num_blocks: int, layers: Sequence[int]
) -> CacheShape:
    """Return the shape of each of these layers, which have the same heads: their blocks alternate."""
    found = {spec.kv_shapes[layer] for layer in layers} or {spec.kv_shapes[0]}
    assert len(found) == 1, f"layers of one pool with different heads: {found}"
    return CacheShape.of(cache.type, num_blocks + 1, cache.block_tokens, found.pop())
