"""Several residual streams, made of kernels: what a part of a layer takes of them, and what it adds to them.

They lie side by side in a row, float32 [T, streams * D]. Every token is treated by itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from thermocline.kernels.dense_contract import MAX_STREAMS, Activation, BalanceRule
from thermocline.kernels.stream_weights import (
    AnyMixer,
    BalancedMixer,
    IndependentMixer,
    LayerStreams,
    StreamMixer,
    StreamSum,
)
from thermocline.kernels.whole_layer import NO_NORM
from thermocline.models.spec import StreamsSpec

if TYPE_CHECKING:
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.weight import FloatArray
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


class Taken(NamedTuple):
    """What a part takes of several streams. x: float32 [T, D], its input. rest: [T, streams * D], to which what it gives is
    added, by shares: [T, streams]; see `widen`.
    """

    x: FloatArray
    rest: FloatArray
    shares: FloatArray


@cache
def _ones(width: int) -> FloatArray:
    """Return gains that change nothing, made once."""
    return np.ones(width, np.float32)


def normed_streams(
    dense: DenseKernels, x: FloatArray, gain: FloatArray, epsilon: float
) -> FloatArray:
    """Return the RMS norm of each stream of x [T, streams * D]: float32 [T, streams, D]. gain: [streams, D]."""
    count, hidden = gain.shape
    plain = dense.rms_norm(x.reshape(-1, hidden), _ones(hidden), epsilon)
    normed: FloatArray = plain.reshape(-1, count, hidden)
    normed *= gain
    return normed


def narrow(kernels: Kernels, mixer: AnyMixer, x: FloatArray, *, prompt: bool) -> Taken:
    """Return what a part takes of the streams x [T, streams * D], and what is left of them."""
    if isinstance(mixer, BalancedMixer):
        return _weigh_streams(kernels, mixer, x)
    if isinstance(mixer, IndependentMixer):
        return _weigh_alone(kernels, mixer, x)
    assert mixer.shares is not None, "a layer's mixer has shares"
    normed = normed_streams(kernels.dense, x, mixer.gain, mixer.epsilon)
    logits = kernels.matmul(mixer.shares, normed.reshape(len(x), -1))
    shares = _sigmoids(kernels.dense, logits, 2)
    return Taken(_gated_mean(kernels, mixer, normed, prompt=prompt), x, shares)


def widen(rest: FloatArray, out: FloatArray, shares: FloatArray) -> FloatArray:
    """Return the streams rest [T, streams * D], each plus its share [T, streams] of out [T, D]."""
    count = shares.shape[1]
    wide = out[:, None] * shares[:, :, None]
    wide += rest.reshape(len(rest), count, -1)
    streams: FloatArray = wide.reshape(rest.shape)
    return streams


def end_streams(
    kernels: Kernels, mixer: StreamMixer | StreamSum | None, x: FloatArray, count: int
) -> FloatArray:
    """Return what a model's end takes of the streams x [T, streams * D]: float32 [T, D], with gates normed; else their mean."""
    if isinstance(mixer, StreamSum):
        return _weighed_sum(kernels, mixer, x)
    if mixer is not None:
        normed = normed_streams(kernels.dense, x, mixer.gain, mixer.epsilon)
        return _gated_mean(kernels, mixer, normed, prompt=False)
    return _mean(x.reshape(len(x), count, -1))


def _gated_mean(
    kernels: Kernels, mixer: StreamMixer, normed: FloatArray, *, prompt: bool
) -> FloatArray:
    dense, flat = kernels.dense, normed.reshape(len(normed), -1)
    low = kernels.matmul(mixer.down, flat, prompt=prompt)
    low = dense.gate(low, low, Activation.SIGMOID)
    gates = kernels.matmul(mixer.up, low, prompt=prompt)
    return _mean(dense.gate(flat, gates, Activation.SIGMOID).reshape(normed.shape))


def _weighed_sum(kernels: Kernels, of: StreamSum, x: FloatArray) -> FloatArray:
    """Return the sum of streams x [T, streams * D], each by its weight."""
    normed = kernels.dense.rms_norm(x, _ones(x.shape[1]), of.epsilon)
    logits = kernels.matmul(of.project, normed) + of.base
    return _summed(x, _sigmoids(kernels.dense, logits, 1) + np.float32(of.floor))


def _summed(x: FloatArray, shares: FloatArray) -> FloatArray:
    """Return the sum of streams x [T, streams * D] times shares [T, streams], added in order."""
    streams = x.reshape(*shares.shape, -1)
    total: FloatArray = streams[:, 0] * shares[:, :1]
    for number in range(1, shares.shape[1]):
        total += streams[:, number] * shares[:, number : number + 1]
    return total


def _mean(streams: FloatArray) -> FloatArray:
    """Return the mean over streams [T, count, D], added in order."""
    total = sum_in_order(streams, 1)
    total *= np.float32(1 / streams.shape[1])
    return total[:, 0]


def _weigh_streams(kernels: Kernels, mixer: BalancedMixer, x: FloatArray) -> Taken:
    """Return what a part takes of streams that are weighed as wholes, and the mixture of them that is left."""
    dense = kernels.dense
    normed = dense.rms_norm(x, _ones(x.shape[1]), mixer.epsilon)
    taken, rest, shares = dense.take_streams(x, kernels.matmul(mixer.project, normed), mixer.rule)
    return Taken(dense.rms_norm(taken, mixer.gain, mixer.epsilon), rest, shares)


def _weigh_alone(kernels: Kernels, mixer: IndependentMixer, x: FloatArray) -> Taken:
    """Return what a part takes of streams that are weighed as wholes, all of which are left."""
    dense, count = kernels.dense, len(mixer.base) // 2
    normed = dense.rms_norm(x, _ones(x.shape[1]), mixer.epsilon)
    logits = kernels.matmul(mixer.project, normed) * mixer.scales + mixer.base
    found, floor = _sigmoids(dense, logits, 1), np.float32(mixer.floor)
    taken = _summed(x, found[:, :count] + floor)
    shares = found[:, count:] * np.float32(mixer.magnitude) + floor
    return Taken(dense.rms_norm(taken, mixer.gain, mixer.epsilon), x, shares)


def sum_in_order(array: FloatArray, axis: int) -> FloatArray:
    """Return the sums over one axis of an array [n, a, b], which is kept, added in order."""
    parts = np.split(array, array.shape[axis], axis=axis)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _sigmoids(dense: DenseKernels, logits: FloatArray, factor: float) -> FloatArray:
    return dense.gate(np.full(logits.shape, factor, np.float32), logits, Activation.SIGMOID)


def balanced_streams(read: SpecReader, *, sums: bool = False) -> StreamsSpec:
    """Return what the file says of streams that are weighed and mixed as wholes. sums: see there. Raises ModelError."""
    key = "hyper_connection.count"
    count = read.size(key, least=2)
    if count > MAX_STREAMS:
        raise read.unsupported(f"{key} = {count} (at most {MAX_STREAMS})")
    return StreamsSpec(
        count,
        rounds=read.size("hyper_connection.sinkhorn_iterations"),
        floor=read.positive_float("hyper_connection.epsilon"),
        sums=sums,
    )


def independent_streams(read: SpecReader) -> StreamsSpec:
    """Return what the file says of streams that are weighed as wholes and not mixed. Raises ModelFileError."""
    return StreamsSpec(
        read.size("hyper_connection.count"),
        floor=read.positive_float("hyper_connection.epsilon"),
        sums=True,
        magnitude=read.positive_float("hyper_connection.magnitude"),
    )


def read_stream_end(
    weights: WeightMap, spec: ModelSpec
) -> tuple[StreamMixer | StreamSum | None, FloatArray]:
    """Return what a model's end takes of its streams, None for their mean, and the gain of the norm behind it, if it has one.

    Raises ModelFileError.
    """
    streams = spec.streams
    if streams is not None and streams.rank:
        return read_stream_mixer(weights, spec, "output_hc", ends=True), NO_NORM
    gain, prefix = weights.vector(spec.output_norm, spec.hidden_size), "output_hc_"
    if streams is None or not streams.sums:
        return None, gain
    project = weights.matrix(f"{prefix}fn.weight", streams.count, spec.stream_size)
    base = weights.vector(f"{prefix}base.weight", streams.count)
    scale = float(weights.vector(f"{prefix}scale.weight", 1)[0])
    project = replace(project, scale=project.scale * scale)
    return StreamSum(project, base, streams.floor, spec.rms_epsilon), gain


def read_stream_mixer(
    weights: WeightMap, spec: ModelSpec, prefix: str, *, ends: bool = False
) -> StreamMixer:
    """Return the mixer whose tensors have this prefix. ends: it is the last one, without shares. Raises ModelFileError."""
    streams, width = spec.streams, spec.stream_size
    assert streams is not None, "a model of one residual stream"
    down = weights.matrix(f"{prefix}_down.weight", streams.rank, width)
    shares = None
    if not ends:
        inject = weights.matrix(f"{prefix}_inject.weight", streams.count, width)
        shares = replace(inject, scale=inject.scale / streams.count)
    return StreamMixer(
        weights.vector(f"{prefix}_norm.weight", width).reshape(streams.count, -1),
        spec.rms_epsilon,
        replace(down, scale=down.scale / streams.count),
        weights.matrix(f"{prefix}_up.weight", width, streams.rank),
        shares,
    )


def _read_balanced_mixer(
    weights: WeightMap, spec: ModelSpec, prefix: str, gain: FloatArray
) -> BalancedMixer:
    streams = spec.streams
    assert streams is not None, "a model of one residual stream"
    rows = (2 + streams.count) * streams.count
    return BalancedMixer(
        weights.matrix(f"{prefix}_fn.weight", rows, spec.stream_size),
        BalanceRule(
            weights.vector(f"{prefix}_base.weight", rows),
            weights.vector(f"{prefix}_scale.weight", 3),
            streams.floor,
            streams.rounds,
        ),
        gain,
        spec.rms_epsilon,
    )


def _read_independent_mixer(
    weights: WeightMap, spec: ModelSpec, prefix: str, gain: FloatArray
) -> IndependentMixer:
    streams = spec.streams
    assert streams is not None, "a model of one residual stream"
    count = streams.count
    return IndependentMixer(
        weights.matrix(f"{prefix}_fn.weight", 2 * count, spec.stream_size),
        np.repeat(weights.vector(f"{prefix}_scale.weight", 2), count),
        weights.vector(f"{prefix}_base.weight", 2 * count),
        streams.magnitude,
        streams.floor,
        gain,
        spec.rms_epsilon,
    )


def read_layer_streams(weights: WeightMap, spec: ModelSpec, index: int) -> LayerStreams:
    """Return a layer's mixers, with the norms of what its parts take; n-grams are read apart. Raises ModelFileError."""
    prefix, parts = f"blk.{index}.", ("attn", "ffn")
    assert spec.streams is not None, "a model of one residual stream"
    if spec.streams.rank:
        mixers = [read_stream_mixer(weights, spec, f"{prefix}hc_{part}") for part in parts]
        return LayerStreams(mixers[0], mixers[1])
    gains = [weights.vector(f"{prefix}{part}_norm.weight", spec.hidden_size) for part in parts]
    read_mixer = _read_independent_mixer if spec.streams.magnitude else _read_balanced_mixer
    pairs = zip(parts, gains, strict=True)
    wholes = [read_mixer(weights, spec, f"{prefix}hc_{part}", gain) for part, gain in pairs]
    return LayerStreams(wholes[0], wholes[1])
