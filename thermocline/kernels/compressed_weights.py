"""Weights of attention to a window of rows and to entries, each made of many rows. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray, Weight, WeightStack
    from thermocline.kernels.whole_layer import LowRank


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """How some tokens' rows become one entry: their mean, weighted by number, then normed and turned.

    kv: [series * dim, hidden], a token's numbers; gate: of the same shape, their weights before a softmax; places: float32
    [ratio, series * dim], added to weights. Of two series the first is of the entry behind a token's own, so that an entry
    is made of twice `ratio` tokens. gain: float32 [dim].
    """

    kv: Weight
    gate: Weight
    places: FloatArray
    gain: FloatArray

    @property
    def ratio(self) -> int:
        """How many tokens lie between one entry and the next."""
        return len(self.places)

    @property
    def dim(self) -> int:
        """Numbers of an entry."""
        return len(self.gain)

    @property
    def series(self) -> int:
        """One, or two."""
        return int(self.places.shape[1]) // self.dim


@dataclass(frozen=True, slots=True, eq=False)
class EntryIndexer:
    """What chooses the entries that a token reads, `most_read` at most; it has entries of its own.

    q: [heads * index, rank of `CompressedWeights.low`]; weights: [heads, hidden], how much a head says, times `scale`.
    """

    q: Weight
    weights: Weight
    scale: float
    compressor: Compressor
    most_read: int


@dataclass(frozen=True, slots=True, eq=False)
class CompressedWeights:
    """One layer's attention to a window of rows and to entries, each made of many; its norm is in its mixer of streams.

    q: [heads * dim, rank of `low`]; kv: [dim, hidden], a row, key and value at once; kv_gain: float32 [dim], of its norm
    with `epsilon`, as that of each head of queries has. window: rows that a token sees, its own included. groups: [rank,
    heads * dim / groups] each, of the heads' numbers; output: [hidden, groups * rank]. sinks, scale: see `Attending`.
    compressor: None where there are no entries; indexer: None where all are read.
    """

    low: LowRank
    q: Weight
    kv: Weight
    kv_gain: FloatArray
    epsilon: float
    window: int
    sinks: FloatArray
    scale: float
    groups: WeightStack
    output: Weight
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None
