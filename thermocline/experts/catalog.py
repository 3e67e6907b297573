"""Where each expert's bytes are in the mapped file. Pure arithmetic on tensor offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.contract import ExpertStack
    from thermocline.messages import ExpertKey, LayerIndex
    from thermocline.models.weights import StackedExperts


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Half-open range of bytes [start, end) of one shard of the file."""

    shard: int
    start: int
    end: int


class ExpertCatalog:
    """Looks up a layer's experts, and the three byte ranges that computing one of them reads."""

    def __init__(self, layers: Sequence[StackedExperts]) -> None:
        self._layers = tuple(layers)

    @property
    def num_layers(self) -> int:
        """Layers with routed experts."""
        return len(self._layers)

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return len(self._layers[0].stack) if self._layers else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(info.nbytes for layer in self._layers for info in layer.tensors)

    def stack(self, layer: LayerIndex) -> ExpertStack:
        """Return views of the mapped bytes of all experts of a layer."""
        return self._layers[layer].stack

    def expert_bytes(self, layer: LayerIndex) -> int:
        """Return the bytes of one expert of a layer."""
        return sum(info.nbytes // info.shape[0] for info in self._layers[layer].tensors)

    def layer_spans(self, layer: LayerIndex) -> tuple[ByteSpan, ...]:
        """Return gate, up and down of all experts of a layer as ranges of the file."""
        infos = self._layers[layer].tensors
        return tuple(ByteSpan(info.shard, info.offset, info.offset + info.nbytes) for info in infos)

    def spans(self, key: ExpertKey) -> tuple[ByteSpan, ...]:
        """Return gate, up and down of one expert as ranges of the file, in reading order."""
        spans = []
        for info in self._layers[key.layer].tensors:
            nbytes = info.nbytes // info.shape[0]
            start = info.offset + key.expert * nbytes
            spans.append(ByteSpan(info.shard, start, start + nbytes))
        return tuple(spans)
