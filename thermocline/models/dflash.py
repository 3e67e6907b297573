"""A block diffusion drafter (DFlash) from a file of its own: its weights, and computing a block of guesses at once.

Its few layers attend to what the drafted model's layers gave for the known tokens, and to the block itself in both
directions. Two layouts of files are published, `dflash` (llama.cpp's) and `*-dflash-draft` (older). Knows no request:
callers give features, tokens, and places in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.dense_contract import Attending
from thermocline.kernels.whole_layer import AttentionWeights
from thermocline.messages import LayerIndex
from thermocline.models.blocks import dense_layer, plain_rope, read_attention, read_head_norm
from thermocline.models.drafter_parts import (
    LoneRow,
    not_for,
    read_dense_drafter,
    split_heads,
    store_pairs,
)
from thermocline.models.layers import RotaryTable, route
from thermocline.models.metadata import SpecReader
from thermocline.models.registry import DFLASH_NAMES
from thermocline.models.weights import WeightMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.cache_format import HeadShape
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import LayerCache, RopeTable, TokenRun
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kernels.whole_layer import LayerParts
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec

_MASK: Final = "tokenizer.ggml.mask_token_id"
MAX_BLOCK_TOKENS: Final = 64
"""Published ones have 8 to 16."""
_UNKNOWN: Final = (
    *("conv_kernel_size", "selector_rank", "hyper_connection.count", "attention.scale"),
    *("attention.value_scale", "final_logit_softcapping", "dflash.dflash2.conv_kernel_size"),
)
"""Keys of later forms of drafters, and of parts that no published one of this form has."""


def is_dflash(file: ModelFile) -> bool:
    """Whether a file holds such a drafter, by its architecture."""
    return file.architecture in DFLASH_NAMES


@dataclass(frozen=True, slots=True)
class DFlashSpec:
    """A drafter's dimensions. decoder: those of its layers, with the drafted model's vocabulary.

    target_layers: layers of the drafted model whose inputs are its features, in their order. block_tokens: of a block,
    the known token included. embedding_scale: of embedded tokens. windows: by layer, how many last positions before a
    block's token it sees; 0 is all.
    """

    decoder: ModelSpec
    target_layers: tuple[LayerIndex, ...]
    block_tokens: int
    mask_token: int
    embedding_scale: float
    windows: tuple[int, ...]

    @property
    def kv_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of keys and values by layer."""
        return self.decoder.kv_shapes


def read_dflash_spec(file: ModelFile, target: ModelFile, spec: ModelSpec) -> DFlashSpec:
    """Return the dimensions of a drafter for the model `target` with `spec`. Raises ModelError where it is not for it."""
    if not is_dflash(file):
        raise UnsupportedModelError(
            file.path,
            "a block diffusion drafter was expected",
            unsupported=(file.architecture,),
            fix="give --draft-model a file of architecture dflash",
        )
    read, is_older = SpecReader(file), file.architecture != DFLASH_NAMES[0]
    read.refuse(*_UNKNOWN)
    if read.flag("attention.causal", default=False):
        raise read.bad("attention.causal", "is true; drafters of this form see their whole block")
    num_layers = read.size("block_count")
    decoder = read_dense_drafter(read, spec, DFLASH_NAMES[0], num_layers, epsilon=1e-6)
    if decoder.hidden_size != spec.stream_size:
        raise _not_for(file, f"its width is {decoder.hidden_size}, not {spec.stream_size}", target)
    prefix = "dflash." if is_older else ""
    # Without a key, converters of this layout meant sixteen.
    block_tokens = read.size(f"{prefix}block_size", default=16, least=2)
    if block_tokens > MAX_BLOCK_TOKENS:
        raise read.bad(f"{prefix}block_size", f"is {block_tokens}, more than {MAX_BLOCK_TOKENS}")
    layers = _target_layers(file, read, spec, is_older=is_older)
    if not all(0 <= layer < spec.num_layers for layer in layers):
        what = f"it reads layers {list(layers)}, of {spec.num_layers} in all"
        raise _not_for(file, what, target)
    window = read.count("attention.sliding_window", default=0)
    flags = read.layer_flags("attention.sliding_window_pattern", decoder.num_layers)
    if window and not flags:
        raise read.bad("attention.sliding_window_pattern", "is missing, beside a window")
    return DFlashSpec(
        decoder,
        layers,
        block_tokens,
        _mask_token(file, target, spec),
        spec.embedding_scale if is_older else read.positive_float("embedding_scale", 1.0, zero=1.0),
        tuple(window if flag else 0 for flag in flags) or (0,) * decoder.num_layers,
    )


def _target_layers(
    file: ModelFile, read: SpecReader, spec: ModelSpec, *, is_older: bool
) -> tuple[LayerIndex, ...]:
    """Return the layers whose inputs are wanted. The older layout names those whose outputs are."""
    prefix = f"{file.architecture}."
    if not is_older:
        return tuple(map(LayerIndex, file.metadata.get_ints(f"{prefix}target_layers")))
    name = f"{prefix}dflash.target_layer_ids"
    if name in file.metadata:
        return tuple(LayerIndex(each + 1) for each in file.metadata.get_ints(name))
    # As the authors spread them where a drafter names none: from the second layer to the fourth from the end.
    count, last = read.size("dflash.n_target_layers"), spec.num_layers - 4
    if count > spec.num_layers:
        raise read.bad("dflash.n_target_layers", f"is {count}, of {spec.num_layers} in all")
    if count == 1:
        return (LayerIndex(spec.num_layers // 2 + 1),)
    return tuple(LayerIndex(round(1 + n * last / (count - 1)) + 1) for n in range(count))


def _mask_token(file: ModelFile, target: ModelFile, spec: ModelSpec) -> int:
    """Return the token that stands for an unknown one: by the drafter's file, else by the model's."""
    older = f"{file.architecture}.dflash.mask_token_id"
    for of, name in ((file, older), (file, _MASK), (target, _MASK)):
        if name in of.metadata:
            token = of.metadata.get_int(name)
            if not 0 <= token < spec.vocab_size:
                raise _not_for(file, f"its mask token is {token}, of {spec.vocab_size}", target)
            return token
    raise ModelFileError(
        file.path,
        f"neither {older} nor {_MASK} says which token stands for an unknown one",
        fix="convert the drafter again with a current converter",
    )


def _not_for(file: ModelFile, what: str, target: ModelFile) -> UnsupportedModelError:
    return not_for(file, what, target, "a drafter that was trained for")


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of blocks, block after block. positions, slots: int32 [T], the rows' own; last: int32 [T], the last position of
    each row's block, up to which the row sees; runs: one for each block.
    """

    tokens: IntArray
    positions: IntArray
    last: IntArray
    slots: IntArray
    runs: Sequence[TokenRun]


class DFlashModel:
    """The drafter over its mapped file, and over that of the model that it drafts for."""

    def __init__(
        self, file: ModelFile, target: ModelFile, target_spec: ModelSpec, kernels: Kernels
    ) -> None:
        """Raises ModelError, also where the drafter was made for another model."""
        self.spec = read_dflash_spec(file, target, target_spec)
        self._kernels = kernels
        decoder, weights, shared = self.spec.decoder, WeightMap(file), WeightMap(target)
        hidden, vocabulary = decoder.hidden_size, decoder.vocab_size
        self._layers = tuple(_read_layer(weights, decoder, n) for n in range(decoder.num_layers))
        if any(_has_biases(_attention_of(layer)) for layer in self._layers):
            raise UnsupportedModelError(
                file.path,
                "this drafter needs something that is not supported",
                unsupported=("biases of attention",),
                fix="use a drafter without them",
            )
        is_older = "dflash.fc.weight" in weights
        fuse, norm = (
            ("dflash.fc.weight", "dflash.hidden_norm.weight")
            if is_older
            else ("fc.weight", "enc.output_norm.weight")
        )
        self._fuse = weights.matrix(fuse, hidden, hidden * len(self.spec.target_layers))
        self._fused_norm = weights.vector(norm, hidden)
        self._norm = weights.vector("output_norm.weight", hidden)
        embeds = weights if "token_embd.weight" in weights else shared
        embedding = embeds.table("token_embd.weight", vocabulary, hidden)
        heads = next((each for each in (weights, shared) if "output.weight" in each), None)
        head = embedding if heads is None else heads.matrix("output.weight", vocabulary, hidden)
        self._head = replace(head, scale=head.scale * target_spec.logit_scale)
        self._embedding = replace(embedding, scale=embedding.scale * self.spec.embedding_scale)
        weights.finish()
        self._rotary = RotaryTable(kernels.dense, plain_rope(decoder))

    def __repr__(self) -> str:
        return f"DFlashModel({self.spec.decoder.name}, blocks of {self.spec.block_tokens})"

    def store(
        self,
        features: FloatArray,
        positions: IntArray,
        slots: IntArray,
        caches: Sequence[LayerCache],
        *,
        prompt: bool,
    ) -> None:
        """Put the keys and values of known tokens into each layer's cache.

        features: float32 [T, layers * D], the inputs of the drafted model's layers at these positions, side by side.
        """
        kernels, dense, epsilon = self._kernels, self._kernels.dense, self.spec.decoder.rms_epsilon
        fused = kernels.matmul(self._fuse, features, prompt=prompt)
        fused = dense.rms_norm(fused, self._fused_norm, epsilon)
        rope = self._rotary.at(positions)
        for parts, cache in zip(self._layers, caches, strict=True):
            store_pairs(kernels, _attention_of(parts), fused, rope, cache, slots, prompt=prompt)

    def logits(self, rows: BlockRows, caches: Sequence[LayerCache]) -> FloatArray:
        """Return float32 [T, V]: for each row what its own place should hold. Writes the rows' keys and values.

        Of a block the first token is known, others are masks; everything before its first position is stored.
        """
        kernels, dense = self._kernels, self._kernels.dense
        x = kernels.decode_rows(self._embedding, rows.tokens)
        rope = self._rotary.at(rows.positions)
        for parts, cache, window in zip(self._layers, caches, self.spec.windows, strict=True):
            x = self._attend(_attention_of(parts), rows, rope, x, cache, window)
            x = route(kernels, parts, x, prompt=True).residual
        x = dense.rms_norm(x, self._norm, self.spec.decoder.rms_epsilon)
        return kernels.matmul(self._head, x, prompt=True)

    def _attend(
        self,
        mixer: AttentionWeights,
        rows: BlockRows,
        rope: RopeTable,
        x: FloatArray,
        cache: LayerCache,
        window: int,
    ) -> FloatArray:
        kernels, dense = self._kernels, self._kernels.dense
        normed = dense.rms_norm(x, mixer.norm, mixer.head_norm.epsilon)
        q, k, v = split_heads(kernels, mixer, normed, cache.shape.head_dim, prompt=True)
        dense.prepare_heads(q, k, v, mixer.head_norm, rope, cache, rows.slots)
        attended = np.empty_like(q)
        # A causal row at the block's last position sees all of its block.
        if not window or int(rows.last.max()) < window:
            attended = dense.attention(q, rows.last, rows.runs, cache, Attending(mixer.scale))
        else:
            for run in rows.runs:
                for row in range(run.start, run.start + run.length):
                    # Its own window begins so far before it, and ends where the block ends.
                    ahead = int(rows.last[row] - rows.positions[row])
                    rule = Attending(mixer.scale, window=window + ahead)
                    here = slice(row, row + 1)
                    alone = (LoneRow(run.block_table),)
                    attended[here] = dense.attention(
                        np.ascontiguousarray(q[here]), rows.last[here], alone, cache, rule
                    )
        return kernels.matmul(mixer.output, attended.reshape(len(x), -1), add=x, prompt=True)


def _read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> LayerParts:
    prefix = f"blk.{index}."
    attention = replace(
        read_attention(weights, spec, prefix), head_norm=read_head_norm(weights, spec, prefix)
    )
    return dense_layer(weights, spec, index, attention).parts


def _attention_of(parts: LayerParts) -> AttentionWeights:
    assert isinstance(parts.mixer, AttentionWeights), "a drafter's layer attends"
    return parts.mixer


def _has_biases(mixer: AttentionWeights) -> bool:
    return mixer.biases is not None or mixer.output_bias is not None
