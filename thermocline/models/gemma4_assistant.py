"""Gemma 4's own drafter, from a file of architecture gemma4-assistant: its weights, and computing one guess after another.

Its few layers have no keys and values: they attend to those of the drafted model's last layers. Knows no request: callers
give tokens, the drafted model's hidden states, and where its cache has what rows see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.whole_layer import AttentionWeights, LayerInput
from thermocline.messages import Chunk, ChunkId, LayerIndex, RequestId, Segment, SegmentKind
from thermocline.models.architectures.gemma4 import read_own_spec, read_reader
from thermocline.models.draft_model import require_same_vocabulary
from thermocline.models.drafter_parts import not_for
from thermocline.models.layers import RotaryTable, begin_attention, route
from thermocline.models.metadata import SpecReader
from thermocline.models.registry import ASSISTANT_NAME
from thermocline.models.weights import WeightMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.errors import UnsupportedModelError
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import LayerCache, RopeTable
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kernels.whole_layer import LayerParts
    from thermocline.kv.pool import KVPool
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec

_TARGET: Final = "gemma4"
_NO_CHUNK: Final = ChunkId(-1)


def is_assistant(file: ModelFile) -> bool:
    """Whether a file holds such a drafter, by its architecture."""
    return file.architecture == ASSISTANT_NAME


@dataclass(frozen=True, slots=True)
class AssistantSpec:
    """A drafter's dimensions. decoder: those of its layers, and its own vocabulary.

    target_layers: for each of its layers the one of the drafted model whose keys and values it attends to. num_tokens: so
    many first tokens it can guess: those that the drafted model has, too.
    """

    decoder: ModelSpec
    target_layers: tuple[LayerIndex, ...]
    num_tokens: int


def read_assistant_spec(file: ModelFile, target: ModelFile, spec: ModelSpec) -> AssistantSpec:
    """Return the dimensions of a drafter for the model `target` with `spec`. Raises ModelError where it is not for it."""
    if spec.architecture != _TARGET:
        raise _not_for(file, f"it drafts for {_TARGET}, not for {spec.architecture}", target)
    read, decoder = SpecReader(file), read_own_spec(file)
    read.require_equal("embedding_length_per_layer_input", 0)
    read.require_equal("nextn_predict_layers", decoder.num_layers)
    if decoder.has_experts:
        raise read.bad("expert_count", "is not 0; drafters of this form have no routed experts")
    width = read.size("embedding_length_out")
    if width != spec.hidden_size:
        what = f"it takes states of {width} numbers, not {spec.hidden_size}"
        raise _not_for(file, what, target)
    require_same_vocabulary(file, target)
    _check_windows(file, read, decoder, spec, target)
    last = {kind: LayerIndex(index) for index, kind in enumerate(spec.layer_kinds)}
    layers = []
    for index, kind in enumerate(decoder.layer_kinds):
        if kind not in last:
            what = f"its layer {index} attends to a layer with {kind}, which the model lacks"
            raise _not_for(file, what, target)
        own, theirs = decoder.kv_shapes[index], spec.kv_shapes[last[kind]]
        if own != theirs:
            what = (
                f"its layer {index} attends to {own.kv_heads} key heads of {own.head_dim} numbers, and the model's "
                f"last layer with {kind} has {theirs.kv_heads} of {theirs.head_dim}"
            )
            raise _not_for(file, what, target)
        layers.append(last[kind])
    return AssistantSpec(decoder, tuple(layers), min(decoder.vocab_size, spec.vocab_size))


def _check_windows(
    file: ModelFile, read: SpecReader, decoder: ModelSpec, spec: ModelSpec, target: ModelFile
) -> None:
    """Refuse a window in which nothing is stored, and one whose first positions the drafted model no longer keeps."""
    assert decoder.window is not None, "Gemma 4's files have one"
    own, theirs = decoder.window.num_tokens, spec.window.num_tokens if spec.window else 0
    if own < 2:
        raise read.bad("attention.sliding_window", f"is {own}; it must be at least 2")
    if own > theirs:
        what = f"its window has {own} tokens, and the model keeps {theirs}"
        raise _not_for(file, what, target)


def _not_for(file: ModelFile, what: str, target: ModelFile) -> UnsupportedModelError:
    return not_for(file, what, target, "the assistant that was published with")


@dataclass(frozen=True, slots=True)
class AssistantRows:
    """One row for each sequence. positions: int32 [T], of the newest known token, whose keys are not there yet.

    tables: blocks of the drafted model's cache that hold all positions before, of layers without a window;
    window_tables: the same of layers with one. Each guess of a draft has the same rows, as drafters of this form are trained.
    """

    positions: IntArray
    tables: Sequence[IntArray]
    window_tables: Sequence[IntArray]


class AssistantModel:
    """The drafter over its mapped file, and over that of the model that it drafts for."""

    def __init__(
        self, file: ModelFile, target: ModelFile, target_spec: ModelSpec, kernels: Kernels
    ) -> None:
        """Raises ModelError, also where the drafter was made for another model."""
        self.spec = read_assistant_spec(file, target, target_spec)
        self._kernels = kernels
        decoder, weights = self.spec.decoder, WeightMap(file)
        hidden, width = decoder.hidden_size, target_spec.hidden_size
        layers = [read_reader(weights, decoder, index) for index in range(decoder.num_layers)]
        self._layers = tuple(_behind_window(layer.parts) for layer in layers)
        rules = [layer.rope for layer in layers]
        tables = {rule: RotaryTable(kernels.dense, rule) for rule in rules if rule is not None}
        self._rotary = tuple(tables[rule] for rule in rules if rule is not None)
        self._join = weights.matrix("nextn.pre_projection.weight", hidden, 2 * width)
        self._leave = weights.matrix("nextn.post_projection.weight", width, hidden)
        self._norm = weights.vector("output_norm.weight", hidden)
        # Not cut as a block's is: this vocabulary has single characters, among them all punctuation, at its end.
        head = weights.matrix("token_embd.weight", decoder.vocab_size, hidden)
        self._head = replace(head, raw=head.raw[: self.spec.num_tokens])
        # They choose a part of the head to compute, to save time. The whole head guesses as well or better.
        weights.leave_out("masked_embd_")
        weights.finish()
        embedding = WeightMap(target).table("token_embd.weight", target_spec.vocab_size, width)
        self._embedding = replace(embedding, scale=target_spec.embedding_scale)

    def __repr__(self) -> str:
        return f"AssistantModel({self.spec.decoder.name})"

    def states(
        self, tokens: IntArray, before: FloatArray, rows: AssistantRows, cache: KVPool
    ) -> FloatArray:
        """Return float32 [T, width], from which `logits` guesses what comes after these tokens. Writes nothing to `cache`.

        before: float32 [T, D], for each row the drafted model's state behind its final norm at the position before the
        newest known token, or `next_before` of the guess before. cache: the drafted model's.
        """
        token = self._kernels.decode_rows(self._embedding, tokens)
        x = self._kernels.matmul(self._join, np.concatenate((token, before), axis=1))
        # What is stored ends before the newest known token: its row sees what the last one that is stored does.
        stored = rows.positions - np.int32(1)
        nowhere = np.arange(len(stored), dtype=np.int32)
        for parts, rotary, layer in zip(
            self._layers, self._rotary, self.spec.target_layers, strict=True
        ):
            assert isinstance(parts.mixer, AttentionWeights), "it attends"
            tables = rows.window_tables if parts.mixer.window else rows.tables
            runs = tuple(
                Segment(RequestId(n), n, 1, SegmentKind.DECODE, table)
                for n, table in enumerate(tables)
            )
            chunk = Chunk(_NO_CHUNK, runs, tokens, stored, nowhere, nowhere)
            x = self._compute_layer(parts, rotary.at(rows.positions), chunk, x, cache.layer(layer))
        return self._kernels.dense.rms_norm(x, self._norm, self.spec.decoder.rms_epsilon)

    def logits(self, states: FloatArray) -> FloatArray:
        """Return float32 [rows, num_tokens of `spec`]: what comes after the tokens of these rows of `states`."""
        return self._kernels.matmul(self._head, np.ascontiguousarray(states))

    def next_before(self, states: FloatArray) -> FloatArray:
        """Return float32 [rows, D], what `states` takes for the guess behind these rows."""
        return self._kernels.matmul(self._leave, np.ascontiguousarray(states))

    def _compute_layer(
        self, parts: LayerParts, rope: RopeTable, chunk: Chunk, x: FloatArray, cache: LayerCache
    ) -> FloatArray:
        kernels = self._kernels
        if kernels.whole_layer is not None:
            given = LayerInput(
                x, chunk.positions, chunk.kv_slots, rope, chunk.segments, cache, is_prompt=False
            )
            return kernels.whole_layer(parts, given)[0]
        assert isinstance(parts.mixer, AttentionWeights), "it attends"
        x = begin_attention(kernels, parts, rope, chunk, x, cache)()
        return route(kernels, parts, x, prompt=False).residual


def _behind_window(parts: LayerParts) -> LayerParts:
    """Return a layer whose window, if it has one, is without the token that attends: nothing is stored of that."""
    mixer = parts.mixer
    assert isinstance(mixer, AttentionWeights), "it attends"
    return replace(parts, mixer=replace(mixer, window=mixer.window - 1)) if mixer.window else parts
