"""Embeddings of n-grams: looked up by hashes of a token and those before it, and added to several residual streams.

Each length from two on has some heads, each with rows of its own in one table, which may be larger than all memory: a token
takes a row of each head. What is looked up is gated by the streams, and a convolution sees it at every n-th token.
The last tokens' ids and their numbers before the convolution are a recurrent state (`NGramSpec.state`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.dense_contract import Activation
from thermocline.kernels.stream_weights import NGramWeights
from thermocline.messages import LayerIndex
from thermocline.models.layer_embeddings import TABLE
from thermocline.models.recurrent_layers import run_rounds
from thermocline.models.spec import LayerKind, NGramSpec
from thermocline.models.streams import normed_streams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.recurrent_contract import RecurrentStates
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import Chunk
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_LEAST_GATE: Final = np.float32(1e-6)
_MAX_TOKENS: Final = 16
_MAX_ROWS: Final = (1 << 31) - 1


def add_ngrams(
    kernels: Kernels,
    weights: NGramWeights,
    spec: NGramSpec,
    chunk: Chunk,
    x: FloatArray,
    states: RecurrentStates,
) -> FloatArray:
    """Return the streams x [T, streams * D] with what a layer adds of n-grams; updates the states of the chunk's sequences."""
    out = np.empty_like(x)
    for runs in run_rounds(chunk, states):
        each = [(first, count, slot) for first, count, slot in runs.tolist()]
        rows = np.concatenate([np.arange(first, first + count) for first, count, _ in each])
        ids = np.concatenate([_take_ids(spec, chunk.token_ids, run, states) for run in each])
        gated, normed = _look_up(kernels, weights, spec, ids, x[rows], prompt=chunk.is_prompt)
        parts = np.split(normed, np.cumsum(runs[:-1, 1]))
        seen = [
            _convolve(weights, spec, part, slot, states)
            for part, (_, _, slot) in zip(parts, each, strict=True)
        ]
        mixed = np.concatenate(seen)
        mixed = kernels.dense.gate(mixed, mixed, Activation.SIGMOID)
        out[rows] = x[rows] + (gated + mixed)
    return out


def hashed_rows(spec: NGramSpec, ids: NDArray[np.int64]) -> IntArray:
    """Return the table's rows of tokens, int32 [n, num_heads], shortest n-grams first.

    ids: [most_tokens - 1 + n], the tokens and those before them, below zero where there is none.
    """
    earlier = spec.most_tokens - 1
    count = len(ids) - earlier
    mixed = ids[earlier:].astype(np.uint64) * np.uint64(spec.factors[0])
    is_cut = np.zeros(count, bool)
    found = []
    for back in range(1, spec.most_tokens):
        before = ids[earlier - back : earlier - back + count]
        is_cut = is_cut | (before < 0) | (before == spec.end_token)
        token = np.where(is_cut, spec.end_token, before).astype(np.uint64)
        mixed = mixed ^ token * np.uint64(spec.factors[back])
        own = slice((back - 1) * spec.heads, back * spec.heads)
        sizes, firsts = (np.array(each[own], np.uint64) for each in (spec.rows, spec.firsts))
        found.append(mixed[:, None] % sizes + firsts)
    return np.concatenate(found, axis=1).astype(np.int32)


def _take_ids(
    spec: NGramSpec, token_ids: IntArray, run: tuple[int, int, int], states: RecurrentStates
) -> IntArray:
    """Return the table's rows of a run's tokens, as `hashed_rows` does; moves the state's ids on.

    A state has ids plus one, as exact floats: 0 for none.
    """
    first, count, slot = run
    kept = states.recurrent[slot, 0, 0]
    ids = np.concatenate((kept.astype(np.int64) - 1, token_ids[first : first + count]))
    kept[:] = ids[len(ids) - len(kept) :] + 1
    return hashed_rows(spec, ids)


def _look_up(
    kernels: Kernels,
    weights: NGramWeights,
    spec: NGramSpec,
    ids: IntArray,
    x: FloatArray,
    *,
    prompt: bool,
) -> tuple[FloatArray, FloatArray]:
    """Return what is added of the n-grams [n, streams * D], and what the convolution sees of it.

    ids: the table's rows, int32 [n, num_heads]; all are asked for before one is waited for.
    """
    dense, (count, hidden) = kernels.dense, weights.key_gain.shape
    rows = kernels.decode_rows(weights.table, ids.reshape(-1), may_be_missing=True)
    rows = rows.reshape(len(ids), -1)
    keys = kernels.matmul(weights.keys, rows, prompt=prompt)
    values = kernels.matmul(weights.value, rows, prompt=prompt)
    keys = normed_streams(dense, keys, weights.key_gain, weights.epsilon)
    keys *= normed_streams(dense, x, weights.query_gain, weights.epsilon)
    logits = keys.sum(axis=-1) / np.float32(math.sqrt(hidden))
    logits = np.sign(logits) * np.sqrt(np.maximum(np.abs(logits), _LEAST_GATE))
    each = np.repeat(values[:, None], count, axis=1).reshape(-1, hidden)
    gated = dense.gate(each, logits.reshape(-1, 1), Activation.SIGMOID).reshape(x.shape)
    normed = normed_streams(dense, gated, weights.conv_gain, weights.epsilon)
    return gated, normed.reshape(x.shape)


def _convolve(
    weights: NGramWeights, spec: NGramSpec, rows: FloatArray, slot: int, states: RecurrentStates
) -> FloatArray:
    """Return the convolution over a sequence's rows [n, streams * D]; moves its state on."""
    kept = states.conv[slot]
    all_rows = np.concatenate((kept, rows))
    kept[:] = all_rows[len(all_rows) - len(kept) :]
    out = np.zeros_like(rows)
    for tap, weight in enumerate(weights.conv):
        start = tap * spec.most_tokens
        out += all_rows[start : start + len(rows)] * weight
    return out


def read_ngram_spec(read: SpecReader, spec: ModelSpec) -> NGramSpec | None:
    """Return what the file says of n-grams; None where it has none. Raises ModelError."""
    if not read.has("ple.layers"):
        return None
    (layer,) = read.integers("ple.layers", 1)
    if layer >= spec.num_layers or spec.layer_kinds[layer] is not LayerKind.RECURRENT:
        raise read.bad("ple.layers", f"names layer {layer}, which keeps no recurrent state")
    most, heads = read.size("ple.ngram_size", least=2), read.size("ple.heads_per_ngram")
    if most > _MAX_TOKENS:
        raise read.bad("ple.ngram_size", f"is {most}; at most {_MAX_TOKENS} is supported")
    total = (most - 1) * heads
    rows = read.integers("ple.head_vocab_sizes", total, least=1)
    firsts = read.integers("ple.head_offsets", total)
    if any(first + count > _MAX_ROWS for first, count in zip(firsts, rows, strict=True)):
        raise read.bad("ple.head_offsets", f"reaches beyond {_MAX_ROWS} rows")
    return NGramSpec(
        layer=LayerIndex(layer),
        most_tokens=most,
        heads=heads,
        width=read.size("embedding_length_per_layer_input"),
        conv_width=read.size("ple.conv_kernel"),
        end_token=read.count("ple.eos_token_id"),
        factors=read.integers("ple.layer_multipliers", most),
        rows=rows,
        firsts=firsts,
    )


def read_ngrams(weights: WeightMap, spec: ModelSpec) -> NGramWeights:
    """Return the weights of the layer with n-grams. Raises ModelFileError."""
    of, wide, streams = spec.ngrams, spec.stream_size, spec.streams
    assert of is not None, "a model without n-grams"
    assert streams is not None, "a model of one residual stream"
    prefix, width = f"blk.{of.layer}.ple_", of.num_heads * of.width
    needed = max(first + count for first, count in zip(of.firsts, of.rows, strict=True))
    key_gain, query_gain, conv_gain = (
        weights.vector(f"{prefix}norm_{part}.weight", wide).reshape(streams.count, -1)
        for part in ("key", "query", "conv")
    )
    conv = weights.array(f"{prefix}conv1d.weight", (wide, of.conv_width))
    return NGramWeights(
        weights.table(TABLE, max(needed, weights.num_rows(TABLE, of.width)), of.width),
        weights.matrix(f"{prefix}key.weight", wide, width),
        weights.matrix(f"{prefix}value.weight", spec.hidden_size, width),
        key_gain,
        query_gain,
        conv_gain,
        np.ascontiguousarray(conv.T),
        spec.rms_epsilon,
    )
