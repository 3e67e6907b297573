"""A decoder of any architecture: its layers are made of shared parts.

An architecture gives it the dimensions and each layer's weights and rules; knows none by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.compressed_weights import CompressedWeights
from thermocline.kernels.dense_contract import RopeTable
from thermocline.kernels.whole_layer import (
    AnyLayerInput,
    AttentionWeights,
    DeltaWeights,
    HandedOn,
    LatentWeights,
    LayerInput,
    LayerParts,
    PlainLayerInput,
    RecurrentLayerInput,
    RecurrentWeights,
)
from thermocline.messages import Routing
from thermocline.models.compressed_attention import CompressedCache, Turns, attend_compressed
from thermocline.models.contract import NonExpertParts
from thermocline.models.latent_attention import Choices, begin_latent_attention
from thermocline.models.layer_embeddings import read_layer_embeddings
from thermocline.models.layers import (
    RotaryTable,
    begin_attention,
    layer_by_parts,
    route,
)
from thermocline.models.metadata import RERANKING_HEAD
from thermocline.models.ngrams import add_ngrams
from thermocline.models.norms import norm_rows, read_centering
from thermocline.models.placed_layers import PlacedLayers
from thermocline.models.recurrent_layers import (
    apply_delta_rule,
    apply_recurrent,
    begin_states,
    cut_runs,
)
from thermocline.models.routing import RouterWeights
from thermocline.models.spec import LayerKind
from thermocline.models.streams import end_streams, narrow, read_stream_end, widen
from thermocline.models.weights import StackedExperts, WeightMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.recurrent_contract import RecurrentStates
    from thermocline.kernels.stream_weights import LayerStreams
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kernels.whole_layer import OnRouted
    from thermocline.kernels.whole_step import StepOutput, WholeStep
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import Chunk, LayerIndex
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.rope import RopeRule
    from thermocline.models.routing import Routed
    from thermocline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer as an architecture reads it from the file."""

    parts: LayerParts
    rope: RopeRule | None
    """None without rotary embedding."""
    experts: StackedExperts | None
    """Where the routed experts lie, if there are any."""


class Decoder:
    """`Model` over a mapped file."""

    def __init__(
        self,
        file: ModelFile,
        kernels: Kernels,
        spec: ModelSpec,
        read_layer: Callable[[WeightMap, ModelSpec, int], DecoderLayer],
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        weights = WeightMap(file, ids=spec.expert_tables)
        embedding = weights.table("token_embd.weight", spec.vocab_size, spec.hidden_size)
        self._embedding = replace(embedding, scale=embedding.scale * spec.embedding_scale)
        layers = [read_layer(weights, spec, index) for index in range(spec.num_layers)]
        self._layers = tuple(layer.parts for layer in layers)
        windowed = [
            isinstance(layer.mixer, AttentionWeights | LatentWeights) and layer.mixer.window > 0
            for layer in self._layers
        ]
        assert windowed == [kind is LayerKind.WINDOW for kind in spec.layer_kinds], (
            "a cache without a window"
        )
        self.expert_layers = tuple(layer.experts for layer in layers)
        self._end_mixer, self._output_norm = read_stream_end(weights, spec)
        output = embedding  # tied, unless the file has a head of its own
        if "output.weight" in weights:
            output = weights.matrix("output.weight", spec.vocab_size, spec.hidden_size)
        self._output = replace(output, scale=output.scale * spec.logit_scale)
        centering, bias = read_centering(weights, spec, spec.output_norm), None
        if spec.norms_have_bias and "output.bias" in weights:
            bias = weights.vector("output.bias", spec.vocab_size) * np.float32(spec.logit_scale)
        self._layer_embeddings = read_layer_embeddings(weights, spec)
        self.score_head: FloatArray | None = None
        if spec.num_scores:
            shape = spec.num_scores, spec.hidden_size
            self.score_head = weights.array(RERANKING_HEAD, shape)
        for index in range(spec.num_layers, spec.num_layers + spec.num_predict_layers):
            weights.leave_out(f"blk.{index}.")
        weights.finish()
        self.non_expert = NonExpertParts(
            self._layers,
            tuple(layer.rope for layer in layers),
            self._output_norm,
            self._output,
            centering,
            bias,
        )
        rules = {layer.rope for layer in layers} - {None}
        tables = {rule: RotaryTable(kernels.dense, rule) for rule in rules if rule is not None}
        self._tables = tables
        self._rotaries = tuple(
            None if layer.rope is None else tables[layer.rope] for layer in layers
        )
        self._choices = Choices()
        self._step: tuple[SequenceCache, PlacedLayers, WholeStep] | None = None

    def embed(self, token_ids: IntArray, *, may_be_missing: bool = False) -> FloatArray:
        table, streams = self._embedding, self.spec.streams
        x = self._kernels.decode_rows(table, token_ids, may_be_missing=may_be_missing)
        return x if streams is None else np.tile(x, streams.count)

    def embed_layers(
        self,
        token_ids: IntArray,
        x: FloatArray,
        *,
        prompt: bool,
        may_be_missing: bool = False,
    ) -> FloatArray | None:
        own = self._layer_embeddings
        if own is None:
            return None
        return own.look_up(
            self._kernels, token_ids, x, prompt=prompt, may_be_missing=may_be_missing
        )

    def attend(
        self, layer: LayerIndex, chunk: Chunk, x: FloatArray, cache: SequenceCache
    ) -> FloatArray:
        weights, streams = self._layers[layer].mixer, self._layers[layer].streams
        match weights:
            case DeltaWeights():
                if streams is not None:
                    return self._recur_in_streams(layer, weights, streams, chunk, x, cache)
                states = _states(cache, layer)
                return apply_delta_rule(self._kernels, weights, chunk, x, states)
            case RecurrentWeights():
                states = _states(cache, layer)
                return apply_recurrent(self._kernels, weights, chunk, x, states)
            case CompressedWeights():
                return self._attend_compressed(layer, weights, chunk, x, cache)
            case _:
                return self.begin_attend(layer, chunk, x, cache)()

    def begin_attend(
        self, layer: LayerIndex, chunk: Chunk, x: FloatArray, cache: SequenceCache
    ) -> Callable[[], FloatArray]:
        parts = self._layers[layer]
        weights = parts.mixer
        if weights is None:
            return lambda: x
        rope, mine = self._rope(layer, chunk), cache.kv.layer(layer)
        taken = None
        if parts.streams is not None:
            taken = narrow(self._kernels, parts.streams.mixer, x, prompt=chunk.is_prompt)
            x = taken.x
        if isinstance(weights, LatentWeights):
            finish = begin_latent_attention(
                self._kernels, weights, rope, chunk, x, mine, self._choices
            )
        else:
            rotary = self._rotaries[layer]
            turns_at = None if rotary is None else rotary.look_up
            finish = begin_attention(self._kernels, parts, rope, chunk, x, mine, turns_at)
        if taken is None:
            return finish
        return lambda: widen(taken.rest, finish(), taken.shares)

    def _attend_compressed(
        self,
        layer: LayerIndex,
        weights: CompressedWeights,
        chunk: Chunk,
        x: FloatArray,
        cache: SequenceCache,
    ) -> FloatArray:
        """Return the streams [T, streams * D] after a layer's attention to a window and to entries."""
        streams, rotary = self._layers[layer].streams, self._rotaries[layer]
        assert streams is not None, "its norm is in a mixer of streams"
        assert rotary is not None, "rows turn"
        assert cache.states is not None, "a window is a state"
        entries = None if weights.compressor is None else cache.kv.layer(layer)
        kept = CompressedCache(cache.kv.type, entries, cache.states.further(layer))
        taken = narrow(self._kernels, streams.mixer, x, prompt=chunk.is_prompt)
        turns = Turns(rotary.at(chunk.positions), rotary.look_up)
        out = attend_compressed(self._kernels, weights, turns, chunk, taken.x, kept)
        return widen(taken.rest, out, taken.shares)

    def _recur_in_streams(
        self,
        layer: LayerIndex,
        weights: DeltaWeights,
        streams: LayerStreams,
        chunk: Chunk,
        x: FloatArray,
        cache: SequenceCache,
    ) -> FloatArray:
        """Return the streams [T, streams * D] after a layer's embeddings of n-grams, if it has them, and its rule."""
        if streams.ngrams is not None:
            assert self.spec.ngrams is not None, "a model with n-grams"
            assert cache.states is not None, "a model with recurrent layers needs a pool of states"
            further = cache.states.further(layer)
            x = add_ngrams(self._kernels, streams.ngrams, self.spec.ngrams, chunk, x, further)
        taken = narrow(self._kernels, streams.mixer, x, prompt=chunk.is_prompt)
        out = apply_delta_rule(self._kernels, weights, chunk, taken.x, _states(cache, layer))
        return widen(taken.rest, out, taken.shares)

    def route(self, layer: LayerIndex, chunk: Chunk, x: FloatArray) -> Routed:
        return route(
            self._kernels,
            self._layers[layer],
            x,
            prompt=chunk.is_prompt,
            embedded=chunk.embedded_at(layer),
            token_ids=chunk.token_ids,
        )

    @property
    def has_whole_layers(self) -> bool:
        return self._kernels.whole_layer is not None

    @property
    def has_whole_steps(self) -> bool:
        return self.has_whole_layers and self._has_native_layers and not self.spec.router.own_used

    @property
    def _has_native_layers(self) -> bool:
        return self.spec.indexer is None and self.spec.streams is None

    def layer(
        self,
        layer: LayerIndex,
        chunk: Chunk,
        x: FloatArray,
        cache: SequenceCache,
        on_routed: OnRouted | None = None,
    ) -> tuple[FloatArray, Routing]:
        whole_layer = self._kernels.whole_layer
        assert whole_layer is not None, "has_whole_layers says whether this may be called"
        assert not chunk.has_branches, "branches are computed part by part"
        parts = self._layers[layer]
        if not self._has_native_layers:
            return layer_by_parts(self._kernels, self, layer, chunk, x, cache, on_routed)
        given: AnyLayerInput
        match parts.mixer:
            case None | CompressedWeights():  # these are computed by parts
                given = PlainLayerInput(x, chunk.is_prompt)
            case DeltaWeights() | RecurrentWeights():
                states = _states(cache, layer)
                begin_states(chunk, states)
                given = RecurrentLayerInput(x, cut_runs(chunk), states, chunk.is_prompt)
            case AttentionWeights() | LatentWeights():
                places = chunk.places(window=parts.mixer.window > 0)
                given = LayerInput(
                    x,
                    chunk.positions,
                    places.slots,
                    self._rope(layer, chunk),
                    places.segments,
                    cache.kv.layer(layer),
                    chunk.is_prompt,
                    chunk.embedded_at(layer),
                )
        out, expert_ids, weights = whole_layer(parts, given, on_routed)
        return out, Routing(expert_ids, weights)

    def step(self, chunk: Chunk, x: FloatArray, cache: SequenceCache) -> StepOutput:
        assert not chunk.is_prompt, "a step is of decoded tokens"
        assert not chunk.has_branches, "branches are computed part by part"
        if self._step is None or self._step[0] is not cache:
            placed = PlacedLayers(self.non_expert, cache, self._tables)
            step = self._kernels.whole_step(placed.layers())
            assert step is not None, "has_whole_steps says whether this may be called"
            self._step = cache, placed, step
        _, placed, step = self._step
        return step(placed.given(chunk, x))

    def router_weights(self, layer: LayerIndex) -> RouterWeights:
        parts = self._layers[layer]
        assert parts.routed is not None, "a dense layer has no router"
        assert parts.norm is not None, "experts have a norm"
        router, rule = parts.routed.router, parts.routed.rule
        if parts.streams is not None:
            mixer = parts.streams.feed_forward
            table = parts.routed.by_token
            return RouterWeights(None, router, parts.epsilon, rule, mixer=mixer, by_token=table)
        own, handed_on = parts.routed.own, parts.handed_on
        gain = None if handed_on is HandedOn.INPUT else parts.norm if own is None else own.router
        return RouterWeights(gain, router, parts.epsilon, rule, parts.centering)

    def final_norm(self, x: FloatArray) -> FloatArray:
        dense, spec = self._kernels.dense, self.spec
        if spec.streams is not None:
            x = end_streams(self._kernels, self._end_mixer, x, spec.streams.count)
        if not len(self._output_norm):
            return x
        centering = self.non_expert.centering
        return norm_rows(dense, x, self._output_norm, spec.rms_epsilon, centering)

    def head(self, x: FloatArray, *, prompt: bool) -> FloatArray:
        logits = self._kernels.matmul(self._output, self.final_norm(x), prompt=prompt)
        if self.non_expert.output_bias is not None:
            logits += self.non_expert.output_bias
        cap = self.spec.logit_softcap
        return self._kernels.dense.softcap(logits, cap) if cap else logits

    def _rope(self, layer: LayerIndex, chunk: Chunk) -> RopeTable:
        rotary = self._rotaries[layer]
        if rotary is None:
            nothing = np.empty((len(chunk.positions), 0), np.float32)
            return RopeTable(nothing, nothing)
        return rotary.at(chunk.positions)


def _states(cache: SequenceCache, layer: LayerIndex) -> RecurrentStates:
    assert cache.states is not None, "a model with recurrent layers needs a pool of states"
    return cache.states.layer(layer)
