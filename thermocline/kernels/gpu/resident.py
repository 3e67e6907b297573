"""A layer's routed experts that a device holds: nothing goes to the host between router and sum.

All experts, or some of them beside the CPU. Slots are looked up on the device, so that captured steps stay valid. Knows
no store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from thermocline.kernels.gpu.expert_ffn import expert_outputs, naive_expert_outputs
from thermocline.kernels.gpu.gather_combine import gather_combine, naive_gather_combine
from thermocline.kernels.gpu.routing_kernels import find_slots
from thermocline.kernels.gpu.slots import SlotWork

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from thermocline.kernels.gpu.layer import LayerOutput
    from thermocline.kernels.gpu.slots import ExpertSlots
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import LayerIndex

# Up to so many pairs, each reads its expert separately: sorting would take longer than reading some experts twice.
_MAX_UNSORTED_PAIRS = 64


class LayerExperts(Protocol):
    """The routed experts of a step through all layers. One thread at a time, `computing`."""

    def upload(self) -> None:
        """Copy to the device what the next step needs."""
        ...

    def sum(
        self, layer: LayerIndex, given: LayerOutput, num_live: torch.Tensor, *, prompt: bool
    ) -> torch.Tensor:
        """Return float32 [T, D]: the residual plus each token's experts, in slot order; queues only.

        num_live: int64 [1], the first rows, which are tokens. No expert is computed for the others.
        """
        ...


class ResidentExperts:
    """`LayerExperts` of a device that has them all."""

    def __init__(
        self,
        streams: DeviceStreams,
        slots: Mapping[LayerIndex, ExpertSlots],
        num_layers: int,
        num_experts: int,
        factors: Mapping[LayerIndex, tuple[FloatArray, FloatArray]],
    ) -> None:
        """factors: `ExpertStack.pair_factors` of the layers that have them."""
        self._slots = dict(slots)
        self._num_experts = num_experts
        self._streams = streams
        self._nowhere = np.full((num_layers, num_experts), -1, np.int32)
        self._made: torch.Tensor | None = None
        with streams.computing():
            self._factors = {
                layer: (streams.upload(gates), streams.upload(outputs))
                for layer, (gates, outputs) in factors.items()
            }
        self._given: IntArray | None = None
        self._known: IntArray | None = None

    def at(self, residency: IntArray) -> Self:
        """Set the experts' slots: int32 [layers, E], below zero for those that are not there."""
        self._given = residency
        return self

    def upload(self) -> None:
        """Copy the slots to the device, unless this array was copied last."""
        if self._given is not None and self._known is not self._given:
            self._table.copy_(torch.from_numpy(self._given))
            self._known = self._given

    @property
    def _table(self) -> torch.Tensor:
        """The slots on the device, int32 [layers, E], always in the same place."""
        if self._made is None:
            self._made = self._streams.upload(self._nowhere)
        return self._made

    def row(self, layer: LayerIndex) -> torch.Tensor:
        """Return the slots of a layer's experts on the device: int32 [E]."""
        return self._table[layer]

    def sum(
        self, layer: LayerIndex, given: LayerOutput, num_live: torch.Tensor, *, prompt: bool
    ) -> torch.Tensor:
        """See `LayerExperts.sum`."""
        if given.ids is None:
            return given.residual
        combine = gather_combine if given.x.is_cuda else naive_gather_combine
        outputs, pair_of = self.outputs(layer, given, num_live, prompt=prompt)
        return combine(outputs, pair_of, given.residual)

    def outputs(
        self, layer: LayerIndex, given: LayerOutput, num_live: torch.Tensor, *, prompt: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs of the token-expert pairs that have a slot, float32 [pairs, D]; queues only.

        And the row of each, int32 [T, chosen]; -1 for padding and for pairs without a slot.
        """
        ids, weights = _routing(given)
        if layer not in self._slots:
            nowhere = ids.new_full(ids.shape, -1, dtype=torch.int32)
            return given.x.new_empty((0, given.x.shape[1])), nowhere
        if ids.numel() > _MAX_UNSORTED_PAIRS:
            work, pair_of = self.by_expert(layer, given, self._table[layer], num_live)
        else:
            find = find_slots if ids.is_cuda else naive_find_slots
            slots, counts, rows, pair_of = find(ids, self._table[layer], num_live)
            pairs = ids.reshape(-1), weights.reshape(-1)
            work = self._work(layer, given.x, (slots, counts, rows), pairs)
        compute = expert_outputs if given.x.is_cuda else _naive_outputs
        return compute(work, prompt=prompt), pair_of

    def by_expert(
        self, layer: LayerIndex, given: LayerOutput, slots: torch.Tensor, num_live: torch.Tensor
    ) -> tuple[SlotWork, torch.Tensor]:
        """Return the work of all pairs, sorted by expert, and the row of each pair in it: see `outputs`.

        slots: int32 [E], of the layer's experts.
        """
        ids, weights = _routing(given)
        order, counts, pair_of = self._sorted(ids, slots, num_live)
        pairs = ids.reshape(-1)[order], weights.reshape(-1)[order]
        rows = (order // ids.shape[1]).int()
        return self._work(layer, given.x, (slots, counts, rows), pairs), pair_of

    def _work(
        self,
        layer: LayerIndex,
        x: torch.Tensor,
        numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pairs: tuple[torch.Tensor, torch.Tensor],
    ) -> SlotWork:
        """numbers: slots, counts and rows of `SlotWork`. pairs: each one's expert and weight."""
        slots, counts, rows = numbers
        experts, weights = pairs
        gate_scale = None
        if layer in self._factors:
            gates, outputs = self._factors[layer]
            weights, gate_scale = weights * outputs[experts], gates[experts]
        return SlotWork(self._slots[layer], slots, counts, x, rows, weights, gate_scale)

    def _sorted(
        self, ids: torch.Tensor, slots: torch.Tensor, num_live: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pairs by expert, int64 [pairs]; each expert's count, int32 [E]; and where each pair is, as `outputs`."""
        num_tokens, num_chosen = ids.shape
        ids = ids.reshape(-1)
        pairs = torch.arange(len(ids), device=ids.device)
        is_live = pairs < num_live * num_chosen
        is_here = is_live & (slots[ids] >= 0)
        # Pairs of padding come last, behind those of all experts.
        ids = torch.where(is_live, ids, self._num_experts)
        order = torch.argsort(ids, stable=True)
        pair_of = torch.empty_like(order).index_copy_(0, order, pairs)
        ones = torch.ones_like(ids, dtype=torch.int32)
        counts = slots.new_zeros(self._num_experts + 1).index_add_(0, ids, ones)
        pair_of = torch.where(is_here, pair_of, -1).view(num_tokens, num_chosen).int()
        return order, counts[: self._num_experts], pair_of


def _routing(given: LayerOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts and their weights, [T, chosen] each."""
    assert given.ids is not None, "a layer without routed experts has no pairs"
    assert given.weights is not None, "a layer without routed experts has no pairs"
    return given.ids, given.weights


def _naive_outputs(work: SlotWork, *, prompt: bool) -> torch.Tensor:
    return naive_expert_outputs(work)


def naive_find_slots(
    ids: torch.Tensor, table: torch.Tensor, num_live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of `find_slots` in plain torch."""
    pairs = torch.arange(ids.numel(), device=ids.device)
    slots = table[ids.reshape(-1)]
    is_live = pairs < num_live * ids.shape[1]
    pair_of = torch.where(is_live & (slots >= 0), pairs, -1).view(ids.shape).int()
    return slots, is_live.int(), (pairs // ids.shape[1]).int(), pair_of
