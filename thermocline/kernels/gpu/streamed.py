"""A layer's routed experts for prompts: those that a device holds, and the others as they are copied to it.

Nothing goes to the host between two layers. A part of a layer's experts is computed while the next one is copied. Knows
no store, and not where parts come from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch

from thermocline.kernels.gpu.expert_ffn import expert_outputs, naive_expert_outputs, with_operands
from thermocline.kernels.gpu.gather_combine import gather_combine, naive_gather_combine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.expert_parts import StreamPart
    from thermocline.kernels.gpu.layer import LayerOutput
    from thermocline.kernels.gpu.resident import ResidentExperts
    from thermocline.kernels.gpu.slots import SlotWork
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import IntArray
    from thermocline.messages import LayerIndex


class PartFeed(Protocol):
    """Copies parts of layers to a device, in order. One thread at a time, `computing`; queues only."""

    def begin(self, parts: Sequence[StreamPart]) -> None:
        """Begin with the first of these parts."""
        ...

    def wait(self, number: int) -> None:
        """Let compute that is queued from now on begin when a part has arrived."""
        ...

    def computed(self, number: int) -> None:
        """All that reads a part was queued: what comes next may take its place when that is done."""
        ...


class StreamedExperts:
    """`LayerExperts` of a device that gets what it lacks while it computes. One thread at a time, `computing`."""

    def __init__(
        self, streams: DeviceStreams, resident: ResidentExperts, feed: PartFeed, num_experts: int
    ) -> None:
        self._streams, self._resident, self._feed = streams, resident, feed
        self._num_experts = num_experts
        self._residency: IntArray = np.zeros((0, num_experts), np.int32)
        self._parts: Sequence[StreamPart] = ()
        self._numbers: dict[LayerIndex, list[int]] = {}
        self._table = torch.empty(0)

    def at(self, residency: IntArray, parts: Sequence[StreamPart]) -> Self:
        """Set the slots of experts that are there, int32 [layers, E], and the parts that bring the others, layer by layer."""
        self._residency, self._parts = residency, parts
        self._numbers = {}
        for number, part in enumerate(parts):
            self._numbers.setdefault(part.layer, []).append(number)
        return self

    def upload(self) -> None:
        """See `LayerExperts.upload`. Begins to copy the first parts, too."""
        num_layers = len(self._residency)
        # A row of slots for each layer, then one for each part, and one of an expert that is anywhere.
        table = np.full((num_layers + len(self._parts) + 1, self._num_experts), -1, np.int32)
        table[:num_layers], table[-1] = self._residency, 0
        for number, part in enumerate(self._parts):
            table[num_layers + number, part.experts] = part.slots
        self._feed.begin(self._parts)
        self._table = self._streams.upload(table)

    def sum(
        self, layer: LayerIndex, given: LayerOutput, num_live: torch.Tensor, *, prompt: bool
    ) -> torch.Tensor:
        """See `LayerExperts.sum`."""
        if given.ids is None:
            return given.residual
        work, pair_of = self._resident.by_expert(layer, given, self._table[-1], num_live)
        if given.x.is_cuda:
            work = with_operands(work, prompt=prompt)
        shape = len(work.rows), given.x.shape[1]
        outputs = torch.empty(shape, dtype=torch.float32, device=given.x.device)
        self._compute(replace(work, slots=self._table[layer]), outputs, prompt=prompt)
        for number in self._numbers.get(layer, ()):
            self._feed.wait(number)
            slots = self._table[len(self._residency) + number]
            self._compute(replace(work, slots=slots), outputs, prompt=prompt)
            self._feed.computed(number)
        combine = gather_combine if given.x.is_cuda else naive_gather_combine
        return combine(outputs, pair_of, given.residual)

    def _compute(self, work: SlotWork, outputs: torch.Tensor, *, prompt: bool) -> None:
        if work.x.is_cuda:
            expert_outputs(work, prompt=prompt, out=outputs)
        else:
            naive_expert_outputs(work, out=outputs)
