"""Several residual streams, made of kernels: what a part of a layer takes of them, and what it adds to them.

They lie side by side in a row, float32 [T, streams * D]. Every token is treated by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.dense_contract import Activation
from thermocline.kernels.whole_layer import LayerStreams, StreamMixer

if TYPE_CHECKING:
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.weight import FloatArray
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def normed_streams(
    dense: DenseKernels, x: FloatArray, gain: FloatArray, epsilon: float
) -> FloatArray:
    """Return the RMS norm of each stream of x [T, streams * D]: float32 [T, streams, D]. gain: [streams, D]."""
    count, hidden = gain.shape
    plain = dense.rms_norm(x.reshape(-1, hidden), np.ones(hidden, np.float32), epsilon)
    normed: FloatArray = plain.reshape(-1, count, hidden)
    normed *= gain
    return normed


def narrow(
    kernels: Kernels, mixer: StreamMixer, x: FloatArray, *, prompt: bool
) -> tuple[FloatArray, FloatArray | None]:
    """Return what a part takes of the streams x [T, streams * D]: float32 [T, D], and their shares of what it gives.

    Shares are float32 [T, streams], for `widen`; None of a mixer without.
    """
    dense, tokens, count = kernels.dense, len(x), len(mixer.gain)
    normed = normed_streams(dense, x, mixer.gain, mixer.epsilon)
    flat = normed.reshape(tokens, -1)
    low = kernels.matmul(mixer.down, flat, prompt=prompt)
    low = dense.gate(low, low, Activation.SIGMOID)
    gates = kernels.matmul(mixer.up, low, prompt=prompt)
    weighed = dense.gate(flat, gates, Activation.SIGMOID).reshape(normed.shape)
    total = weighed[:, 0] + weighed[:, 1]
    for stream in range(2, count):
        total += weighed[:, stream]
    total *= np.float32(1 / count)
    if mixer.shares is None:
        return total, None
    logits = kernels.matmul(mixer.shares, flat)
    twos = np.full(logits.shape, 2, np.float32)
    return total, dense.gate(twos, logits, Activation.SIGMOID)


def widen(x: FloatArray, out: FloatArray, shares: FloatArray) -> FloatArray:
    """Return the streams x [T, streams * D], each plus its share [T, streams] of out [T, D]."""
    count = shares.shape[1]
    wide = out[:, None] * shares[:, :, None]
    wide += x.reshape(len(x), count, -1)
    streams: FloatArray = wide.reshape(x.shape)
    return streams


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


def read_layer_streams(weights: WeightMap, spec: ModelSpec, index: int) -> LayerStreams:
    """Return a layer's mixers; n-grams are read apart. Raises ModelFileError."""
    mixer, feed_forward = (
        read_stream_mixer(weights, spec, f"blk.{index}.hc_{part}") for part in ("attn", "ffn")
    )
    return LayerStreams(mixer, feed_forward)
