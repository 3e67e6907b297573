"""Decides which experts should be in memory: a model of the page cache, with a budget of bytes. Pure.

Prompt chunks use the layers in turn, so the layer just computed is needed last and is evicted first: a cyclic scan
through a least-recently-used cache would hit nothing. Behind a prompt's last chunk, and during decode, the experts go
that were selected least by the last tokens. Knows no page, no kernel and no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import LayerIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thermocline.messages import ExpertIndex, FloatArray, IntArray

_NEVER_VICTIM = np.iinfo(np.int64).max
# The order of eviction, in one number: a layer's distance outweighs every heat, a heat outweighs every age.
_AGE_BITS = 20
_HEAT_BITS = 17
_DISTANCE_BITS = _HEAT_BITS + _AGE_BITS
HALF_LIFE_TOKENS = 128
"""After so many tokens a selection counts half."""


@dataclass(frozen=True, slots=True)
class CacheAdmission:
    """experts: int32, those that were admitted; evicted: int32 [n, 2], each a (layer, expert)."""

    experts: IntArray
    evicted: IntArray
    unused_bytes: int
    """Bytes of those that were never selected."""


class CacheModel:
    """Which experts are held, how often and when each was last used, and which are evicted."""

    def __init__(self, expert_bytes: Sequence[int], num_experts: int, capacity_bytes: int) -> None:
        shape = (len(expert_bytes), num_experts)
        self._bytes = np.array(expert_bytes, np.int64)
        self._routed: list[int] = np.flatnonzero(self._bytes).tolist()
        self._stamps: NDArray[np.int64] = np.zeros(shape, np.int64)  # 0: not held
        self._selected = np.zeros(shape, np.bool_)
        # Selections per token, of the last tokens: the chance that the next one selects it.
        self._heat: NDArray[np.float64] = np.zeros(shape)
        self._distances: NDArray[np.int64] = np.zeros(shape[0], np.int64)
        self._tick = 1
        self.capacity_bytes = capacity_bytes
        self.current_bytes = 0

    def __repr__(self) -> str:
        return (
            f"CacheModel({np.count_nonzero(self._stamps)} experts, "
            f"{self.current_bytes} of {self.capacity_bytes} bytes)"
        )

    @property
    def num_layers(self) -> int:
        """All layers, those without experts included."""
        return len(self._bytes)

    @property
    def num_routed(self) -> int:
        """Layers with routed experts."""
        return len(self._routed)

    def place(self, layer: LayerIndex) -> int:
        """Return how many layers with routed experts come before `layer`."""
        return bisect_left(self._routed, layer)

    def routed_after(self, layer: LayerIndex, distance: int) -> LayerIndex:
        """Return the layer with routed experts that is so many of them after `layer`, going round.

        Distance 0 is `layer`, or the next that has experts. It is `layer`, too, where no layer has any.
        """
        if not self._routed:
            return layer
        return LayerIndex(self._routed[(self.place(layer) + distance) % len(self._routed)])

    def advance(
        self, positions: Sequence[LayerIndex], last_positions: Sequence[LayerIndex] = ()
    ) -> None:
        """Begin a step. positions: the layers where prompts are now; none during pure decode.

        last_positions: of last chunks, behind which nothing of the prompt follows. What is used or admitted from here on
        is not evicted before the next step.
        """
        self._tick += 1
        if not (positions or last_positions):
            self._distances[:] = 0
            return
        layers = np.arange(self.num_layers)
        ahead = [(layers - position) % self.num_layers for position in positions]
        ahead += [
            np.where(layers < position, self.num_layers, layers - position)
            for position in last_positions
        ]
        self._distances = np.min(ahead, axis=0)

    def observe(
        self, layer: LayerIndex, experts: IntArray, shares: FloatArray, num_tokens: int
    ) -> None:
        """Note which part of a chunk's tokens selected each of `experts`; float32 [n] as `experts`."""
        kept = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self._heat[layer] *= kept
        self._heat[layer, experts] += (1 - kept) * shares

    def has_room_for(self, experts: NDArray[np.bool_]) -> bool:
        """Return whether `experts`, bool [layers, experts], fit all at once, held or not."""
        return int(experts.sum(axis=1) @ self._bytes) <= self.capacity_bytes

    def held(self, layer: LayerIndex, experts: IntArray) -> NDArray[np.bool_]:
        """Return which of `experts` are held."""
        held: NDArray[np.bool_] = self._stamps[layer, experts] > 0
        return held

    def missing(self, layer: LayerIndex) -> IntArray:
        """Return every expert of a layer that is not held."""
        return np.flatnonzero(self._stamps[layer] == 0).astype(np.int32)

    def selected_of_held(self, layer: LayerIndex) -> float:
        """Return how many of a layer's held experts the next token will likely select: as many as the last tokens did.

        Before HALF_LIFE_TOKENS were seen it is too low.
        """
        return float(self._heat[layer] @ (self._stamps[layer] > 0))

    def use(self, layer: LayerIndex, experts: IntArray) -> None:
        """Note that `experts`, held or not, are being computed."""
        held = experts[self.held(layer, experts)]
        self._stamps[layer, held] = self._tick
        self._selected[layer, held] = True

    def admit(self, layer: LayerIndex, experts: IntArray, *, evict: bool = True) -> CacheAdmission:
        """Admit as many of `experts` (none of them held), in order, as there is room for.

        evict: experts that are needed later may be evicted for them.
        """
        each = int(self._bytes[layer])
        free = self.capacity_bytes - self.current_bytes
        lacking = len(experts) * each - free
        gone, unused_bytes = np.empty((0, 2), np.int32), 0
        if lacking > 0 and evict:
            gone, unused_bytes = self._evict(lacking, int(self._distances[layer]))
        room = (self.capacity_bytes - self.current_bytes) // each
        admitted = experts[: max(0, room)]
        self._stamps[layer, admitted] = self._tick
        self._selected[layer, admitted] = False
        self.current_bytes += len(admitted) * each
        return CacheAdmission(admitted, gone, unused_bytes)

    def forget(self, layer: LayerIndex, expert: ExpertIndex) -> None:
        """Drop an admitted expert that will not be fetched."""
        if self._stamps[layer, expert]:
            self._stamps[layer, expert] = 0
            self.current_bytes -= int(self._bytes[layer])

    def was_selected(self, layer: LayerIndex, expert: ExpertIndex) -> bool:
        """Return whether a held expert was used since it was admitted."""
        return bool(self._selected[layer, expert] and self._stamps[layer, expert])

    def _evict(self, nbytes: int, distance: int) -> tuple[IntArray, int]:
        ages = np.minimum(self._tick - self._stamps, (1 << _AGE_BITS) - 1)
        # What was fetched for the next layer of a decode step has yet to be looked for there.
        is_next = ~self._selected & (self._stamps == self._tick - 1)
        heat = (np.where(is_next, 1.0, self._heat) * ((1 << _HEAT_BITS) - 1)).astype(np.int64)
        score = (heat << _AGE_BITS) - ages - (self._distances[:, None] << _DISTANCE_BITS)
        keep = (self._stamps == 0) | (self._stamps == self._tick)
        keep |= (self._distances < distance)[:, None]
        if distance:
            keep |= (self._distances == distance)[:, None]
        score[keep] = _NEVER_VICTIM
        most = min(score.size, nbytes // int(self._bytes[self._bytes > 0].min()) + 1)
        flat = score.reshape(-1)
        order = np.argpartition(flat, most - 1)[:most]
        order = order[np.argsort(flat[order], kind="stable")]
        order = order[flat[order] != _NEVER_VICTIM]
        sums = np.cumsum(self._bytes[order // score.shape[1]])
        order = order[: int(np.searchsorted(sums, nbytes)) + 1]
        keys = np.stack(np.divmod(order, score.shape[1]), axis=1).astype(np.int32)
        layers, experts = keys[:, 0], keys[:, 1]
        self.current_bytes -= int(self._bytes[layers].sum())
        unused_bytes = int(self._bytes[layers[~self._selected[layers, experts]]].sum())
        self._stamps[layers, experts] = 0
        return keys, unused_bytes
