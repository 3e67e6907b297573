"""How layers attend, as plain numbers: windows, latent rows, indexers, entries. Knows no tensor data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from thermocline.kernels.recurrent_contract import StateShape

if TYPE_CHECKING:
    from thermocline.models.rope import RopeRule

CHOSEN_RATIO: Final = 4
"""Of layers with entries, those in which each is made of twice so many tokens choose what they read."""


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """How layers with a sliding window differ from the others."""

    num_tokens: int
    """How many last positions a token sees, its own included."""
    rope: RopeRule
    chunked: bool = False
    """Whether the window does not slide; see `Attending`. What slides keeps all that such a token sees."""
    latent: LatentSpec | None = None
    """How these layers attend where heads share one cached row, and the others have rows of other sizes."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention, whose heads share one cached row per token."""

    rank: int
    """Numbers of a row that values are made of; those behind them are turned."""
    query_rank: int
    """Numbers between the two matrices of queries; 0 where there is one matrix."""
    key_dim: int
    """Of one head, with what is turned."""
    value_dim: int
    turned: int
    sinks: bool = False
    """Whether each head has a sink."""

    @property
    def row(self) -> int:
        """Numbers of a cached row."""
        return self.rank + self.turned

    @property
    def plain(self) -> int:
        """Numbers of a head's key that are not turned."""
        return self.key_dim - self.turned

    @property
    def expanded_tokens(self) -> int:
        """Return how many tokens of a prompt attend together in the expanded form; 0 where that never pays.

        Keys and values of a position cost rank * (plain + value_dim) multiplications per head, and then each pair of
        a token and a position this much less than in the absorbed form, which pays the same for each of its tokens. A
        power of two of at least the tokens for which both cost the same at far positions (at near ones the expanded
        form always wins): 256 in DeepSeek and Kimi, 512 in GLM-4.7-Flash. The form has no sinks.
        """
        if self.sinks:
            return 0
        saved = 2 * self.rank - self.plain - self.value_dim
        if saved <= 0:
            return 0
        even = self.rank * (self.plain + self.value_dim) / saved
        return 1 << math.ceil(math.log2(even))


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """What chooses the positions that tokens read."""

    num_heads: int
    dim: int
    """Numbers of a head."""
    most_read: int
    """How many positions a token reads."""
    pairs: bool
    """Whether neighbours turn together, or halves."""
    layers: tuple[int, ...]
    """Those that choose; others of latent attention take the choice of the last one before them."""
    block: int = 1
    """So many positions are chosen together."""
    weighs_keys: bool = False
    """Whether a block's key is a weighted mean, whose weights are cached beside keys; else a plain one."""
    epsilon: float = 1e-6
    """Of the norm of its keys, where that takes the mean off; most files do not say it."""
    local: int = 0
    """So many last blocks are read always."""
    by_head: bool = False
    """Whether each key head has blocks of its own, whose positions all have keys."""
    turns_last: bool = False
    """Whether the last numbers of its heads turn, not the first."""

    @property
    def row(self) -> int:
        """Numbers of a cached row."""
        return 2 * self.dim if self.weighs_keys else self.dim


@dataclass(frozen=True, slots=True)
class EntriesSpec:
    """How tokens read a window of rows, and entries that are each made of many tokens' rows."""

    window: int
    """Rows that a token sees, its own included."""
    ratios: tuple[int, ...]
    """By layer, of how many tokens an entry more is made; 0 in layers without entries."""
    rope: RopeRule
    """What turns in layers with entries."""
    groups: int
    """Heads lie in so many groups, whose numbers go through a matrix each."""
    rank: int
    """Numbers of what such a matrix gives."""
    query_rank: int
    """Numbers between the two matrices of queries."""
    index_heads: int
    index_dim: int
    """Numbers of a head of an indexer."""
    most_read: int
    """Entries that a token reads of layers with an indexer."""

    def series(self, layer: int) -> int:
        """Return of how many times its ratio an entry of a layer is made: two where entries are chosen."""
        return 2 if self.is_chosen(layer) else 1

    def is_chosen(self, layer: int) -> bool:
        """Whether a layer's tokens read chosen entries, not all."""
        return self.ratios[layer] == CHOSEN_RATIO

    def state(self, layer: int, dim: int) -> StateShape:
        """Return what a layer keeps of a sequence: the last rows, and the numbers that entries will be made of."""
        ratio, series = self.ratios[layer], self.series(layer)
        index = self.index_dim if self.is_chosen(layer) else 0
        made = (1, series * ratio, 2 * series * (dim + index)) if ratio else (0, 0, 0)
        return StateShape((self.window, dim), made)
