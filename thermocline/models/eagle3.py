"""An EAGLE-3 drafter from a file of its own: its weights, and computing one guess after another.

Its one layer takes a token beside the state of the position before: what three of the drafted model's layers got there, or,
behind a guess, what the drafter itself gave. Knows no request: callers give tokens, states, and places in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.dense_contract import Attending, HeadNorm
from thermocline.kernels.whole_layer import AttentionWeights
from thermocline.messages import LayerIndex
from thermocline.models.blocks import dense_layer, plain_rope, read_rope_factors
from thermocline.models.draft_model import require_same_vocabulary
from thermocline.models.drafter_parts import (
    LoneRow,
    not_for,
    read_dense_drafter,
    split_heads,
    store_pairs,
)
from thermocline.models.layers import RotaryTable, route
from thermocline.models.metadata import SpecReader
from thermocline.models.registry import EAGLE3_NAME
from thermocline.models.weights import WeightMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.cache_format import HeadShape
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import LayerCache
    from thermocline.kernels.weight import FloatArray, IntArray, Weight
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec

_NUM_LAYERS_READ: Final = 3
_TOKENS_OF_ROWS: Final = "d2t"
"""The tensor that says which token of the model each row of the head is for."""


def is_eagle3(file: ModelFile) -> bool:
    """Whether a file holds such a drafter, by its architecture."""
    return file.architecture == EAGLE3_NAME


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """A drafter's dimensions. decoder: those of its layer.

    target_layers: layers of the drafted model whose inputs are its features, in their order. target_width: numbers of
    one such input. norms_features: they are normed before they are mixed. adds_normed: the layer adds what it computes
    to the normed state, not to the state.
    """

    decoder: ModelSpec
    target_layers: tuple[LayerIndex, ...]
    target_width: int
    norms_features: bool
    adds_normed: bool

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values by layer."""
        return self.decoder.kv_shapes


def read_eagle3_spec(file: ModelFile, target: ModelFile, spec: ModelSpec) -> Eagle3Spec:
    """Return the dimensions of a drafter for the model `target` with `spec`. Raises ModelError where it is not for it."""
    read = SpecReader(file)
    read.require_equal("block_count", 1)
    width = read.size("target_hidden_size")
    if width != spec.stream_size:
        what = f"it reads layers of a width of {width}, not {spec.stream_size}"
        raise _not_for(file, what, target)
    layers = file.metadata.get_ints(f"{file.architecture}.target_layers")
    if len(layers) != _NUM_LAYERS_READ:
        raise read.bad("target_layers", f"has {len(layers)} entries, not {_NUM_LAYERS_READ}")
    if not all(0 <= layer < spec.num_layers for layer in layers):
        what = f"it reads what layers {list(layers)} get, of {spec.num_layers} in all"
        raise _not_for(file, what, target)
    require_same_vocabulary(file, target)
    return Eagle3Spec(
        read_dense_drafter(read, spec, EAGLE3_NAME, 1, rope_base=10_000.0),
        tuple(map(LayerIndex, layers)),
        width,
        norms_features=read.flag("norm_before_fc", default=False),
        adds_normed=read.flag("norm_before_residual", default=False),
    )


def _not_for(file: ModelFile, what: str, target: ModelFile) -> UnsupportedModelError:
    return not_for(file, what, target, "an EAGLE-3 drafter that was trained for")


@dataclass(frozen=True, slots=True, eq=False)
class StatedTokens:
    """Tokens, each with the state of the position before. positions: int32 [T], of the tokens, at least 1.

    before: float32 [T, D], of `Eagle3Model.fuse` or `Eagle3Model.states`. slots: int32 [T], where keys and values go.
    A sequence's first token has no state before it, so nothing is at its place.
    """

    tokens: IntArray
    before: FloatArray
    positions: IntArray
    slots: IntArray


class Eagle3Model:
    """The drafter over its mapped file, and over that of the model that it drafts for."""

    def __init__(
        self, file: ModelFile, target: ModelFile, target_spec: ModelSpec, kernels: Kernels
    ) -> None:
        """Raises ModelError, also where the drafter was made for another model."""
        self.spec = read_eagle3_spec(file, target, target_spec)
        self._kernels = kernels
        decoder, weights = self.spec.decoder, WeightMap(file, ids=(_TOKENS_OF_ROWS,))
        hidden, num_features = decoder.hidden_size, self.spec.target_width * _NUM_LAYERS_READ
        self._fuse = weights.matrix("fc.weight", hidden, num_features)
        self._feature_norm = None
        if self.spec.norms_features:
            self._feature_norm = weights.vector("enc.output_norm.weight", num_features)
        self._mixer = _read_attention(weights, decoder)
        self._state_norm = weights.vector("blk.0.attn_norm_2.weight", hidden)
        layer = dense_layer(weights, decoder, 0, self._mixer)
        self._parts = layer.parts
        factors = read_rope_factors(weights, decoder.rotary_dims)
        rope = replace(plain_rope(decoder), pairs=True, factors=factors)
        self._rotary = RotaryTable(kernels.dense, rope)
        self._norm = weights.vector("output_norm.weight", hidden)
        self._embedding, self._num_embedded = self._read_embedding(file, target, weights)
        self._head, self._tokens = self._read_head(file, target, weights)
        weights.finish()

    def __repr__(self) -> str:
        return f"Eagle3Model({self.spec.decoder.name}, {len(self._tokens)} tokens)"

    def fuse(self, features: FloatArray, *, prompt: bool = False) -> FloatArray:
        """Return float32 [T, D], the state of positions where the drafted model's layers got these features.

        features: float32 [T, layers * target_width], side by side.
        """
        if self._feature_norm is not None:
            epsilon = self.spec.decoder.rms_epsilon
            features = self._kernels.dense.rms_norm(features, self._feature_norm, epsilon)
        return self._kernels.matmul(self._fuse, features, prompt=prompt)

    def store(self, rows: StatedTokens, cache: LayerCache, *, prompt: bool = False) -> None:
        """Put the keys and values of these rows into the cache: with one layer they need no other row."""
        joined, _ = self._joined(rows)
        rope = self._rotary.at(rows.positions - np.int32(1))
        store_pairs(self._kernels, self._mixer, joined, rope, cache, rows.slots, prompt=prompt)

    def states(
        self, rows: StatedTokens, tables: Sequence[IntArray], cache: LayerCache
    ) -> FloatArray:
        """Return float32 [T, D], from which `logits` guesses what comes after each row's token; a guess takes it as its state.

        Puts the rows' keys and values into the cache. tables: of each row the blocks of its sequence, of which
        all positions between the first and the row's are stored, or are rows here.
        """
        kernels, dense, mixer = self._kernels, self._kernels.dense, self._mixer
        joined, normed = self._joined(rows)
        q, k, v = split_heads(kernels, mixer, joined, cache.shape.head_dim, prompt=False)
        # It learnt to count from the first pair of token and state, whose token is the second.
        rope = self._rotary.at(rows.positions - np.int32(1))
        dense.prepare_heads(q, k, v, mixer.head_norm, rope, cache, rows.slots)
        attended = np.empty_like(q)
        for row, table in enumerate(tables):
            here = slice(row, row + 1)
            # It sees all but the place of the first token, which has no pair.
            rule = Attending(mixer.scale, window=int(rows.positions[row]))
            runs = (LoneRow(table),)
            attended[here] = dense.attention(
                np.ascontiguousarray(q[here]), rows.positions[here], runs, cache, rule
            )
        added = normed if self.spec.adds_normed else np.ascontiguousarray(rows.before)
        x = kernels.matmul(mixer.output, attended.reshape(len(joined), -1), add=added)
        return route(kernels, self._parts, x, prompt=False).residual

    def logits(self, states: FloatArray) -> FloatArray:
        """Return float32 [T, rows of the head]: what comes after the tokens of these states. See `token_of`."""
        x = self._kernels.dense.rms_norm(
            np.ascontiguousarray(states), self._norm, self.spec.decoder.rms_epsilon
        )
        return self._kernels.matmul(self._head, x)

    def token_of(self, row: int) -> int:
        """Return the drafted model's token that a row of the head is for."""
        return int(self._tokens[row])

    def _joined(self, rows: StatedTokens) -> tuple[FloatArray, FloatArray]:
        """Return what the layer attends with, float32 [T, 2 * D], and the normed states in it, [T, D]."""
        dense, epsilon = self._kernels.dense, self.spec.decoder.rms_epsilon
        # One of the two vocabularies may have more tokens at its end.
        ids = np.where(rows.tokens < self._num_embedded, rows.tokens, 0).astype(np.int32)
        token = self._kernels.decode_rows(self._embedding, ids)
        token = dense.rms_norm(token, self._mixer.norm, epsilon)
        state = dense.rms_norm(np.ascontiguousarray(rows.before), self._state_norm, epsilon)
        return np.concatenate((token, state), axis=1), state

    def _read_embedding(
        self, file: ModelFile, target: ModelFile, weights: WeightMap
    ) -> tuple[Weight, int]:
        """Return the drafter's embedding, or the model's where it has none, and the tokens in it."""
        name, hidden = "token_embd.weight", self.spec.decoder.hidden_size
        if name in weights:
            count = weights.num_rows(name, hidden)
            return weights.table(name, count, hidden), count
        count = self.spec.decoder.vocab_size
        self._check_shared(file, target, "embedding")
        return WeightMap(target).table(name, count, hidden), count

    def _read_head(
        self, file: ModelFile, target: ModelFile, weights: WeightMap
    ) -> tuple[Weight, IntArray]:
        """Return the drafter's head, or the model's where it has none, and int32 [rows], the token of each row."""
        name, (hidden, count) = "output.weight", (self._norm.size, self.spec.decoder.vocab_size)
        tokens = np.arange(count, dtype=np.int32)
        if name not in weights:
            self._check_shared(file, target, "head")
            if _TOKENS_OF_ROWS in weights:
                raise ModelFileError(
                    file.path,
                    f"tensor {_TOKENS_OF_ROWS!r} names the tokens of a head, and {name!r} is missing",
                    fix="convert or download the drafter again",
                )
            shared = WeightMap(target)
            own = name if name in shared else "token_embd.weight"  # tied
            return shared.matrix(own, count, hidden), tokens
        if _TOKENS_OF_ROWS in weights:
            tokens = self._read_tokens(file, target, weights)
            return weights.matrix(name, len(tokens), hidden), tokens
        num_rows = weights.num_rows(name, hidden)
        head = weights.matrix(name, num_rows, hidden)
        num_shared = min(num_rows, count)
        return replace(head, raw=head.raw[:num_shared]), tokens[:num_shared]

    def _read_tokens(self, file: ModelFile, target: ModelFile, weights: WeightMap) -> IntArray:
        tokens = weights.ids(_TOKENS_OF_ROWS)
        count = self.spec.decoder.vocab_size
        outside = tokens[(tokens < 0) | (tokens >= count)]
        if outside.size:
            what = f"it guesses token {int(outside[0])}, of {count} in all"
            raise _not_for(file, what, target)
        return tokens.astype(np.int32)

    def _check_shared(self, file: ModelFile, target: ModelFile, what: str) -> None:
        """Refuse a drafter that has no matrix of its own and a width that the model's does not fit."""
        width = self.spec.decoder.hidden_size
        if width != self.spec.target_width:
            problem = (
                f"it has no {what} of its own, and a width of {width}, not {self.spec.target_width}"
            )
            raise _not_for(file, problem, target)


def _read_attention(weights: WeightMap, spec: ModelSpec) -> AttentionWeights:
    """Return attention whose inputs are a token and a state, side by side."""
    hidden, prefix = spec.hidden_size, "blk.0.attn_"
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return AttentionWeights(
        norm=weights.vector(f"{prefix}norm.weight", hidden),
        q=weights.matrix(f"{prefix}q.weight", q_size, 2 * hidden),
        k=weights.matrix(f"{prefix}k.weight", kv_size, 2 * hidden),
        v=weights.matrix(f"{prefix}v.weight", kv_size, 2 * hidden),
        biases=None,
        output=weights.matrix(f"{prefix}output.weight", hidden, q_size),
        head_norm=HeadNorm(None, None, spec.rms_epsilon),
        scale=spec.attention_scale,
        output_bias=None,
    )
