"""Counts how often each expert was chosen, exactly and with decay. Pure; the router stage reports here.

Knows no placement and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.config import HALF_LIFE_TOKENS
from thermocline.experts.dispatch.grouping import count_choices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.messages import IntArray, LayerIndex, Routing

    Warmth = NDArray[np.float64]
    Repeats = NDArray[np.float64]

# Choices within this part of a half-life count alike: decay costs one pass over a layer for many records.
_STEPS_PER_HALF_LIFE: Final = 64
# Of a prompt's chunk, as many tokens are compared with the one before them.
_COMPARED_TOKENS: Final = 64
NO_REPEATS: Final = np.zeros((1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class HeatRecord:
    """What is known of a model's experts.

    warmth: choices, each halved for every `half_life_tokens` since; float64 [layers, experts], zeros in
    layers without experts. num_tokens: all that were ever counted. repeats: of as many choices (second column), how many
    the token before had made too (first); float64 [layers, 2], or `NO_REPEATS`.
    """

    warmth: Warmth
    num_tokens: int
    half_life_tokens: int = HALF_LIFE_TOKENS
    repeats: Repeats = field(default_factory=NO_REPEATS.copy)

    def followed_by(self, later: HeatRecord) -> HeatRecord:
        """Return what is known after `later`, which began when this ended and has the same shape."""
        kept = 0.5 ** (later.num_tokens / later.half_life_tokens)
        return HeatRecord(
            np.maximum(self.warmth * kept + later.warmth, 0.0),
            self.num_tokens + later.num_tokens,
            later.half_life_tokens,
            self.repeats * kept + later.repeats,
        )

    def since(self, earlier: HeatRecord) -> HeatRecord:
        """Return what came after `earlier`, a record of the same counts: `earlier.followed_by` it is this record.

        Its warmth may be a little below zero, where a layer was a chunk behind the others in `earlier`.
        """
        num_tokens = self.num_tokens - earlier.num_tokens
        kept = 0.5 ** (num_tokens / self.half_life_tokens)
        return HeatRecord(
            self.warmth - earlier.warmth * kept,
            num_tokens,
            self.half_life_tokens,
            self.repeats - earlier.repeats * kept,
        )

    def repeat_shares(self) -> tuple[float, ...] | None:
        """Return by layer the share of a token's choices that the token before made too; None where nothing is known."""
        again, of = np.broadcast_to(self.repeats, (len(self.warmth), 2)).T
        if not of.any():
            return None
        return tuple((again / np.where(of, of, 1.0)).tolist())


@dataclass(frozen=True, slots=True)
class LayerUse:
    """How unevenly one layer's experts are used.

    top: the most used ones with their share of the layer's choices, the first one first.
    top_quarter_share: what the most used quarter of them takes; 0.25 is even. entropy_bits: log2 of
    the number of experts is even.
    """

    top: tuple[tuple[int, float], ...]
    top_quarter_share: float
    entropy_bits: float


def layer_use(warmth: Warmth, num_top: int) -> LayerUse | None:
    """Return the use of a layer's experts, float64 [experts]; None where none was ever chosen."""
    total = float(warmth.sum())
    if not total:
        return None
    share = warmth / total
    order = (-share).argsort(kind="stable")
    used = share[share > 0]
    num_quarter = max(1, len(share) // 4)
    return LayerUse(
        tuple((int(expert), float(share[expert])) for expert in order[:num_top] if share[expert]),
        float(share[order[:num_quarter]].sum()),
        abs(float(used @ np.log2(used))),
    )


class _Past(NamedTuple):
    """A layer's heat at some token: the counts and tokens that it contains, and what they have faded to."""

    warmth: Warmth
    counts: NDArray[np.int64]
    num_tokens: int


class ExpertHeat:
    """Choices per (layer, expert) since the start. Written by the lane that routes, read by anybody."""

    def __init__(
        self, num_layers: int, num_experts: int, half_life_tokens: int = HALF_LIFE_TOKENS
    ) -> None:
        self._half_life = half_life_tokens
        self._step = max(1, half_life_tokens // _STEPS_PER_HALF_LIFE)
        self._counts = np.zeros((num_layers, num_experts), np.int64)
        self._num_tokens = np.zeros(num_layers, np.int64)
        self._repeats = np.zeros((num_layers, 2))
        self._past_tokens = np.zeros(num_layers, np.int64)
        self._since_kept = 0  # tokens of whole steps
        nothing = _Past(np.zeros(num_experts), np.zeros(num_experts, np.int64), 0)
        self._past = [nothing] * num_layers

    def record_step(
        self, layers: IntArray, expert_ids: IntArray, residency: IntArray
    ) -> tuple[int, int]:
        """Count one chunk's choices of layers int32 [n]: int32 [n, T, K].

        Returns how many of them have a slot in `residency`, int32 [all layers, E], and in how many layers all have.
        """
        found = count_choices(expert_ids, layers, residency, self._counts, self._num_tokens)
        self._since_kept += expert_ids.shape[1]
        if self._since_kept >= self._step:
            self._since_kept = 0
            for layer in layers.tolist():
                self._keep(layer)
        return found

    def record(self, layer: LayerIndex, routing: Routing) -> None:
        """Count one chunk's choices of one layer."""
        num_tokens = len(routing.expert_ids)
        if num_tokens == 1:  # no expert twice
            self._counts[layer, routing.expert_ids[0]] += 1
        else:
            num_experts = self._counts.shape[1]
            chosen = routing.expert_ids.reshape(-1)
            self._counts[layer] += np.bincount(chosen, minlength=num_experts)
        self._num_tokens[layer] += num_tokens
        if self._num_tokens[layer] - self._past_tokens[layer] >= self._step:
            self._keep(layer)

    def record_repeats(self, layer: LayerIndex, consecutive: IntArray) -> None:
        """Count which choices of a layer, int32 [T, K] of consecutive tokens, the token before made too."""
        ids = consecutive[: _COMPARED_TOKENS + 1]
        if ids.shape[1] and len(ids) > 1:
            again = (ids[1:, :, None] == ids[:-1, None, :]).any(axis=2)
            self._repeats[layer] += (np.count_nonzero(again), again.size)

    def counts(self) -> NDArray[np.int64]:
        """Return a copy, int64 [layers, experts]."""
        return self._counts.copy()

    def known(self) -> HeatRecord:
        """Return what was seen since the start."""
        warmth = np.array([self._now(layer).warmth for layer in range(len(self._past))])
        num_tokens = int(self._num_tokens.max(initial=0))
        return HeatRecord(warmth, num_tokens, self._half_life, self._repeats.copy())

    def _keep(self, layer: int) -> None:
        self._past[layer] = self._now(layer)
        self._past_tokens[layer] = self._num_tokens[layer]

    def _now(self, layer: int) -> _Past:
        past, num_tokens = self._past[layer], int(self._num_tokens[layer])
        counts = self._counts[layer].copy()
        kept = 0.5 ** ((num_tokens - past.num_tokens) / self._half_life)
        return _Past(past.warmth * kept + (counts - past.counts), counts, num_tokens)
