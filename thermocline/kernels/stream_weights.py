"""What a layer has where there are several residual streams: mixers of its parts, n-grams, and the sum at a model's end.

Knows no model and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import BalanceRule
    from thermocline.kernels.weight import FloatArray, Weight


@dataclass(frozen=True, slots=True, eq=False)
class StreamMixer:
    """What a part of a layer takes of several residual streams, and how much each stream takes of what it gives.

    gain: float32 [streams, hidden], of an RMS norm of each stream, with `epsilon`. down: [rank, streams * hidden]; up:
    [streams * hidden, rank]: sigmoid(up @ silu(down @ normed)) weighs the normed streams, whose mean is taken. shares:
    [streams, streams * hidden]: what the part gives is added to stream s, times 2 * sigmoid(shares @ normed)[s]. None at the
    end of a model.
    """

    gain: FloatArray
    epsilon: float
    down: Weight
    up: Weight
    shares: Weight | None


@dataclass(frozen=True, slots=True, eq=False)
class BalancedMixer:
    """The same of streams that are weighed and mixed as wholes: manifold-constrained hyper-connections.

    project: [(2 + streams) * streams, streams * hidden], of all streams normed together, gives the logits of
    `DenseKernels.take_streams`. gain: float32 [hidden], of the norm of what a part takes; with `epsilon`, as the one before.
    """

    project: Weight
    rule: BalanceRule
    gain: FloatArray
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class IndependentMixer:
    """The same of streams that are weighed as wholes, and not mixed: independent hyper-connections.

    project: [2 * streams, streams * hidden], of all streams normed together; times scales and plus base, float32 [2 * streams],
    it gives the logits of weights, then those of shares. A weight is sigmoid + floor, a share magnitude * sigmoid + floor.
    gain: float32 [hidden], of the norm of what a part takes; with `epsilon`, as the one before.
    """

    project: Weight
    scales: FloatArray
    base: FloatArray
    magnitude: float
    floor: float
    gain: FloatArray
    epsilon: float


AnyMixer: TypeAlias = StreamMixer | BalancedMixer | IndependentMixer
"""What a part of a layer takes of several residual streams."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamSum:
    """What a model's end takes of streams that are weighed as wholes: their sum, each times sigmoid(project @ normed + base) + floor.

    project: [streams, streams * hidden], of all of them after an RMS norm with `epsilon`; base: float32 [streams].
    """

    project: Weight
    base: FloatArray
    floor: float
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class NGramWeights:
    """Embeddings of n-grams, added to several residual streams before a layer; see `models.ngrams`.

    table: [rows, width]; keys: [streams * hidden, heads * width]; value: [hidden, heads * width]; conv: float32 [conv_width,
    streams * hidden], the oldest token's first. Gains: float32 [streams, hidden], of RMS norms with `epsilon`.
    """

    table: Weight
    keys: Weight
    value: Weight
    key_gain: FloatArray
    query_gain: FloatArray
    conv_gain: FloatArray
    conv: FloatArray
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerStreams:
    """What a layer has where there are several residual streams. ngrams: added before all else, where it has them."""

    mixer: AnyMixer
    feed_forward: AnyMixer
    ngrams: NGramWeights | None = None
